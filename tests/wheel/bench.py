"""Time and memory of an installed wheel's forward pass, mode off and on, and of stock kernels beside it.

    python tests/wheel/bench.py --json bench.json [--stock PATH_TO_STOCK_EXTENSION.so]

The variants alternate in one process on the same random tensors; times are medians of CUDA events in
milliseconds, memory is what the call allocates above its inputs. ``--stock`` takes an extension of
unpatched upstream, built from the same pin with the same flags (nox -s build -- --stock); without it
the ratios are against this wheel with the mode off.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flash_attn import deterministic_mode, fork_info

import flash_attn_2_cuda  # isort: skip - torch and flash_attn load the libraries that it needs

Call = Callable[[], list[torch.Tensor]]
EVEN_MN, ONE_BLOCK, APART = 1, 2, 4


def load(path: Path) -> Any:
    """An extension module from a file; its name is the file's."""
    spec = importlib.util.spec_from_file_location(path.name.partition(".")[0], path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prefill(extension: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> list[torch.Tensor]:
    return extension.fwd(q, k, v, None, None, 0.0, q.shape[-1] ** -0.5, causal, -1, -1, 0.0, False, None)


def decode(extension: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    nothing = [None] * 2
    return extension.fwd_kvcache(q, k, v, *nothing, lengths, *nothing, None, None, None, None, None, q.shape[-1] ** -0.5, True, -1, -1, 0.0, True, 0)


def on(split_size: int, call: Call, paths: int = 0) -> Call:
    def run() -> list[torch.Tensor]:
        before = flash_attn_2_cuda._test_paths(paths)
        try:
            with deterministic_mode(split_size=split_size):
                return call()
        finally:
            flash_attn_2_cuda._test_paths(before)

    return run


def measure(calls: dict[str, Call], seconds: float = 0.6) -> dict[str, dict[str, float]]:
    """Alternate the calls until each has had its share; medians, and peak memory above the inputs."""
    results: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        results[name] = {"mb": (torch.cuda.max_memory_allocated() - base) / 2**20}
    times: dict[str, list[float]] = {name: [] for name in calls}
    total = 0.0
    while total < seconds * 1000 * len(calls) or len(times[next(iter(calls))]) < 5:
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
            total += times[name][-1]
        if len(times[name]) >= 200:
            break
    for name, values in times.items():
        results[name]["ms"] = statistics.median(values)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--stock", type=Path, help="an extension of unpatched upstream")
    parser.add_argument("--head-dim", type=int, default=64)
    arguments = parser.parse_args()
    stock = load(arguments.stock) if arguments.stock else None
    d = arguments.head_dim
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    bits: list[dict[str, Any]] = []

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16)

    def record(case: str, calls: dict[str, Call]) -> None:
        figures = measure(calls)
        base = figures["stock" if stock else "off"]["ms"]
        rows.append({"case": case, **{name: {**f, "ratio": f["ms"] / base} for name, f in figures.items()}})
        print(case.ljust(28), "  ".join(f"{n} {f['ms']:.4f} ({f['ms'] / base:.2f}, {f['mb']:.0f} MB)" for n, f in figures.items()), flush=True)

    for batch, length in ((4, 2048), (8, 4096), (16, 8192)):
        q, k, v = (tensor(batch, length, 32, d) for _ in range(3))
        for causal in (False, True):
            ours = lambda q=q, k=k, v=v, causal=causal: prefill(flash_attn_2_cuda, q, k, v, causal)  # noqa: E731
            calls: dict[str, Call] = {"stock": lambda q=q, k=k, v=v, causal=causal: prefill(stock, q, k, v, causal)} if stock else {}
            calls |= {"off": ours, "on 512": on(512, ours), "on 2048": on(2048, ours)}
            if length < 8192:
                calls |= {"on 512, even MN": on(512, ours, EVEN_MN), "on 512, apart": on(512, ours, APART), "on 2048, apart": on(2048, ours, APART)}
            record(f"prefill {batch}x{length} {'causal' if causal else 'full'}", calls)
        del q, k, v
        torch.cuda.empty_cache()

    for batch, keys in ((1, 32768), (1, 131072), (4, 16384), (8, 32768), (16, 16384), (64, 4096), (256, 2048)):
        q, k, v = tensor(batch, 1, 32, d), tensor(batch, keys, 8, d), tensor(batch, keys, 8, d)
        lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        ours = lambda q=q, k=k, v=v, n=lengths: decode(flash_attn_2_cuda, q, k, v, n)  # noqa: E731
        calls = {"stock": lambda q=q, k=k, v=v, n=lengths: decode(stock, q, k, v, n)} if stock else {}
        calls |= {
            "off": ours,
            "on 512": on(512, ours),
            "on 1024": on(1024, ours),
            "on 2048": on(2048, ours),
            "on 2048, one block": on(2048, ours, ONE_BLOCK),
            "on 2048, apart": on(2048, ours, APART),
        }
        record(f"decode {batch}x{keys} 32/8", calls)

    # Does a path change a bit? Even shapes, each with and without.
    for batch, len_q, len_k, causal in ((2, 2048, 2048, False), (2, 2048, 2048, True), (8, 64, 4096, False), (3, 512, 8192, True)):
        q, k, v = tensor(batch, len_q, 8, d), tensor(batch, len_k, 8, d), tensor(batch, len_k, 8, d)
        call = lambda q=q, k=k, v=v, causal=causal: prefill(flash_attn_2_cuda, q, k, v, causal)  # noqa: E731
        out, lse = on(512, call)()[:2]
        for name, paths in (("even MN", EVEN_MN), ("one block", ONE_BLOCK), ("apart", APART)):
            other_out, other_lse = on(512, call, paths)()[:2]
            differing = int(
                (out.view(torch.int16) != other_out.view(torch.int16)).sum() + (lse.view(torch.int32) != other_lse.view(torch.int32)).sum()
            )
            bits.append({"shape": [batch, len_q, len_k], "causal": causal, "paths": name, "differing": differing, "of": out.numel() + lse.numel()})
    print("bits that differ with other paths:", {f"{b['shape']} {b['paths']}": b["differing"] for b in bits})

    for group in ("prefill", "decode"):
        mean = {}
        for name in ("off", "on 512", "on 2048"):
            ratios = [row[name]["ratio"] for row in rows if row["case"].startswith(group)]
            mean[name] = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"geometric mean, {group}, against {'stock' if stock else 'off'}:", {name: round(value, 3) for name, value in mean.items()})
    if arguments.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "fork": fork_info(), "head_dim": d, "rows": rows, "bits": bits}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

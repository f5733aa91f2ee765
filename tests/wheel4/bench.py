"""Times of the installed flash_attn.cute on this machine's GPU, mode off and on.

    PYTHONPATH=…/tests/wheel python tests/wheel4/bench.py --json bench-fa4.json

Variants alternate in one process on the same random tensors (fp16); times are medians of CUDA events in milliseconds.
The first variant of a case is what the others' ratios are to. With the mode off, kernels are upstream's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
from flash_attn.cute import deterministic_mode, flash_attn_func, fork_info, fork_rows, fork_split
from timing import Call, geometric_mean, measure, write
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

FORMAT = 1
PREFILL = ((4, 2048), (8, 4096), (16, 8192))
DECODE = ((1, 32768), (1, 131072), (4, 16384), (8, 32768), (16, 16384), (64, 4096), (256, 2048))
NEW, CHUNKED = 512, (16384, 131072)  # queries, on caches of so many keys before them
HEADS, CACHE_HEADS = 32, 8
VALUES = {192: 128}  # the head dim of values, where it is not that of keys
MEASURED_PEER = (64, 128)  # head dims that cuDNN is measured at
SPLIT_SIZES = (2048, 512)

Case = tuple[str, dict[str, Call]]


def on(split_size: int, run: Callable[[], Any]) -> Call:
    return Call(run, lambda: deterministic_mode(split_size=split_size))


@contextmanager
def forced(path: str | None, rows: int | None, *residency: int) -> Iterator[None]:
    """Chunks of 2048 keys, walked or spread, and a kernel of that tile, with those stages and blocks."""
    before = fork_split.force_path(path), fork_rows.force(rows, fork_rows.Residency(*residency))
    try:
        with deterministic_mode(split_size=SPLIT_SIZES[0]):
            yield
    finally:
        fork_split.force_path(before[0])
        fork_rows.force(*before[1])


def tensors(batch: int, len_q: int, len_k: int, heads_k: int, d: int) -> list[torch.Tensor]:
    shapes = ((batch, len_q, HEADS, d), *[(batch, len_k, heads_k, size) for size in (d, VALUES.get(d, d))])
    return [torch.randn(shape, dtype=torch.float16, device="cuda") for shape in shapes]


def prefill(d: int) -> Iterator[Case]:
    for batch, length in PREFILL:
        q, k, v = tensors(batch, length, length, HEADS, d)
        for causal in (False, True):
            run = partial(flash_attn_func, q, k, v, causal=causal)
            calls = {"off": Call(run), **{f"on {size}": on(size, run) for size in SPLIT_SIZES}}
            yield f"{batch}x{length} {'causal' if causal else 'full'}", calls


def memory(d: int) -> Iterator[Case]:
    """Prefill whose running results lie in memory, also where shared memory has room, and at 96 in smaller tiles."""
    for batch, length in PREFILL:
        q, k, v = tensors(batch, length, length, HEADS, d)
        for causal in (False, True):
            run = partial(flash_attn_func, q, k, v, causal=causal)
            calls = {"off": Call(run), "on 2048": on(2048, run)}
            calls["walked in memory"] = Call(run, partial(forced, "walked in memory", None, 2, 1))
            if d == 96:
                calls["walked, 128 rows"] = Call(run, partial(forced, "walked", 128, 2, 1))
            yield f"{batch}x{length} {'causal' if causal else 'full'}", calls


def backward(d: int) -> Iterator[Case]:
    for batch, length in PREFILL:
        inputs = [t.requires_grad_() for t in tensors(batch, length, length, HEADS, d)]
        dout = torch.randn_like(flash_attn_func(*inputs)[0])
        for causal in (False, True):
            outs = {
                name: flash_attn_func(*inputs, causal=causal, deterministic=deterministic)[0]
                for name, deterministic in (("off, deterministic", True), ("off", False))
            }
            with deterministic_mode(split_size=SPLIT_SIZES[0]):
                outs["on"] = flash_attn_func(*inputs, causal=causal)[0]
            calls = {
                name: Call(partial(torch.autograd.grad, out, inputs, dout, retain_graph=True))
                for name, out in outs.items()
            }
            yield f"{batch}x{length} {'causal' if causal else 'full'}", calls


def decode(d: int) -> Iterator[Case]:
    yield from ((case, calls) for case, calls, _ in decode_calls(d))


def tiles(d: int) -> Iterator[Case]:
    """Decode in other tiles than calls of few rows have: rows, stages, thread blocks on a multiprocessor."""
    usual = (192 if d == 64 else 128, 2, 1)
    others = {64: [(64, 2, 1), (64, 4, 1), (64, 2, 2), (64, 3, 2)], 128: [(64, 1, 2), (64, 2, 1), (64, 3, 1)]}
    for case, usually, run in decode_calls(d):
        yield (
            case,
            {
                **{name: usually[name] for name in ("cuDNN", "on 2048") if name in usually},
                **{
                    f"spread {o}": Call(run, partial(forced, "spread", *o))
                    for o in [usual, *others.get(d, [])]
                },
                "walked (64, 1, 2)": Call(run, partial(forced, "walked", 64, 1, 2)),
                "walked (64, 2, 1)": Call(run, partial(forced, "walked", 64, 2, 1)),
            },
        )


def decode_calls(d: int) -> Iterator[tuple[str, dict[str, Call], Callable[[], Any]]]:
    for batch, length in DECODE:
        q, k, v = tensors(batch, 1, length, CACHE_HEADS, d)
        run = partial(flash_attn_func, q, k, v)
        calls = {"off": Call(run), **{f"on {size}": on(size, run) for size in SPLIT_SIZES}}
        calls |= {"cuDNN": cudnn(q, k, v)} if d in MEASURED_PEER else {}
        calls |= first_series(partial(_first_series, q, k, v))
        yield f"{batch}x{length}", calls, run


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """The same through PyTorch, on cuDNN's kernels, without a mask."""
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    return Call(
        partial(scaled_dot_product_attention, *turned, enable_gqa=True),
        lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    )


def first_series(run: Callable[[], Any]) -> dict[str, Call]:
    """The same on the kernels of the flash_attn wheel, where that is installed; splits of 2048 with its mode on."""
    try:
        from flash_attn import flash_attn_with_kvcache  # noqa: F401
    except ImportError:
        return {}
    return {"flash_attn, off": Call(run), "flash_attn, on 2048": on(SPLIT_SIZES[0], run)}


def chunked(d: int) -> Iterator[Case]:
    """New tokens on a long cache that holds them; cuDNN's are without the causal mask, which it lacks there."""
    for before in CHUNKED:
        q, k, v = tensors(1, NEW, before + NEW, CACHE_HEADS, d)
        run = partial(flash_attn_func, q, k, v, causal=True)
        calls = {"off": Call(run), **{f"on {size}": on(size, run) for size in SPLIT_SIZES}}
        calls |= {"cuDNN, full": cudnn(q, k, v)} if d in MEASURED_PEER else {}
        yield f"1x{NEW} on {before}", calls | first_series(partial(_first_series, q, k, v))


def _first_series(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    from flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache(q, k, v, causal=True)


GROUPS = {
    "prefill": prefill,
    "backward": backward,
    "decode": decode,
    "chunked": chunked,
    "tiles": tiles,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write every figure here, after each case")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument(
        "--group", choices=GROUPS, nargs="+", default=["prefill", "backward", "decode", "chunked"]
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="for each variant of a case")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    facts = {
        "format": FORMAT,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "toolchain": machine.toolchain(),
        "fork": fork_info(),
        "rows": rows,
    }
    for d in arguments.head_dim:
        for group in arguments.group:
            ratios: dict[str, list[float]] = {}
            for case, calls in GROUPS[group](d):
                figures = measure(calls, arguments.seconds)
                base = next(iter(figures.values()))["ms"]
                for name, figure in figures.items():
                    rows.append({"group": group, "head_dim": d, "case": case, "variant": name, **figure})
                    ratios.setdefault(name, []).append(figure["ms"] / base)
                told = (f"{name} {f['ms']:.4g} ({f['ms'] / base:.3f})" for name, f in figures.items())
                print(f"{group} d{d} {case}: {', '.join(told)}", flush=True)
                if arguments.json:
                    write(arguments.json, facts)
            means = (f"{name} {geometric_mean(r):.3f}" for name, r in ratios.items())
            print(f"{group} d{d}, geometric means: {', '.join(means)}", flush=True)


if __name__ == "__main__":
    main()

"""Time and memory of an installed wheel's kernels, mode off and on, and of stock kernels beside it.

    python tests/wheel/bench.py --json bench.json --stock PATH_TO_STOCK_EXTENSION.so

The variants alternate in one process on the same random tensors; times are medians of CUDA events in
milliseconds, without what the caller's thread takes to launch, which is told apart; memory is what the call
allocates above its inputs. ``--stock`` takes an extension of
upstream with the one patch that lets a build choose kernel files, built with the same flags (nox -s build -- --stock); without it
the ratios are against this wheel with the mode off. ``nox -s bench`` does all of it, and
``nox -s bench -- kernels --from bench.json`` holds the figures against the goals and draws them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from extension_files import load
from flash_attn import deterministic_mode, fork_info, set_deterministic_mode
from timing import Call, geometric_mean, measure, write

import flash_attn_2_cuda  # isort: skip - torch and flash_attn load the libraries that it needs

# _test_paths of the extension
UNEVEN, ONE_BLOCK, APART, STANDARD, IN_TURNS, OWN_TILES, WIDE = (2**bit for bit in range(7))

PREFILL = ((4, 2048), (8, 4096), (16, 8192))
DECODE = ((1, 32768), (1, 131072), (4, 16384), (8, 32768), (16, 16384), (64, 4096), (256, 2048))
CHUNKED = (16384, 131072)
DRAFTS = ((1, 32768), (8, 32768))
CHECKED, GROUPS = 4, (4, 8)  # queries of each sequence; heads that share keys
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
EVEN = ((2, 2048, 2048, False), (2, 2048, 2048, True), (8, 64, 4096, False), (3, 512, 8192, True))
TOKENS = 32768  # of the sequences of one length together
NEW, MILLION = 512, 2**20  # queries on many keys
HEADS = (32, 8)  # of queries, and of keys on a cache


@dataclass(frozen=True)
class Case:
    """One problem: ``calls`` by variant; the first is what the others' times are told as multiples of."""

    group: str
    head_dim: int
    batch: int
    len_q: int
    len_k: int
    heads: int
    heads_k: int
    causal: bool
    calls: dict[str, Call]

    def __str__(self) -> str:
        shape = (
            f"{self.batch}x{self.len_k}"
            if self.len_q in (1, self.len_k)
            else f"{self.batch}x{self.len_q} on {self.len_k}"
        )
        if self.group == "drafts":
            shape += f" of {self.heads_k} heads"
        return f"{self.group} d{self.head_dim} {shape}" + (
            " causal" if self.causal and self.len_q > 1 else ""
        )


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def prefill(
    extension: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> list[torch.Tensor]:
    return extension.fwd(q, k, v, None, None, 0.0, q.shape[-1] ** -0.5, causal, -1, -1, 0.0, False, None)


def decode(
    extension: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    num_splits: int = 0,
    table: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    nothing = [None] * 2
    scale = q.shape[-1] ** -0.5
    return extension.fwd_kvcache(
        q,
        k,
        v,
        *nothing,
        lengths,
        *nothing,
        None,
        None,
        table,
        None,
        None,
        scale,
        True,
        -1,
        -1,
        0.0,
        True,
        num_splits,
    )


def backward(
    extension: Any,
    upstream: torch.Tensor,
    inputs: list[torch.Tensor],
    results: list[torch.Tensor],
    causal: bool,
    deterministic: bool,
) -> list[torch.Tensor]:
    scale = inputs[0].shape[-1] ** -0.5
    nothing = [None] * 4
    return extension.bwd(
        upstream, *inputs, *results, *nothing, 0.0, scale, causal, -1, -1, 0.0, deterministic, None, None
    )


@contextlib.contextmanager
def mode_on(split_size: int | None, paths: int) -> Iterator[None]:
    before = flash_attn_2_cuda._test_paths(paths)
    try:
        with deterministic_mode(split_size=split_size):
            yield
    finally:
        flash_attn_2_cuda._test_paths(before)


def on(split_size: int | None, call: Call, paths: int = 0) -> Call:
    """The call in deterministic mode; ``None``: the default split_size."""
    return Call(call.run, functools.partial(mode_on, split_size, paths))


def one_block_fits(d: int) -> bool:
    """Whether this GPU's thread blocks hold a chunk's result beside the tiles (head dims up to 128)."""
    needed = 2 * d * (64 + 2 * 128) + 4 * 64 * d + 512
    return torch.cuda.get_device_properties().shared_memory_per_block_optin >= needed


def variants(stock: Any, call: Callable[[Any], list[torch.Tensor]], *split_sizes: int) -> dict[str, Call]:
    """A call of an extension: stock's, ours, and ours in deterministic mode with the default and with these split sizes."""
    ours = Call(lambda: call(flash_attn_2_cuda))
    calls = {"stock": Call(lambda: call(stock))} if stock else {}
    return (
        calls | {"off": ours, "on": on(None, ours)} | {f"on {size}": on(size, ours) for size in split_sizes}
    )


def whole(group: str, stock: Any, d: int, batch: int, length: int, causal: bool) -> Case:
    q, k, v = (tensor(batch, length, HEADS[0], d) for _ in range(3))
    calls = variants(stock, lambda e: prefill(e, q, k, v, causal), 512, 2048)
    if group == "prefill" and length < 8192:
        for name, paths in (("on 512, uneven", UNEVEN), ("on 512, apart", APART), ("on 2048, apart", APART)):
            calls[name] = on(int(name.split(",")[0][3:]), calls["off"], paths)
    return Case(group, d, batch, length, length, HEADS[0], HEADS[0], causal, calls)


def cached(group: str, stock: Any, d: int, batch: int, new: int, keys: int) -> Case:
    """The last ``new`` of ``keys`` tokens on a cache that holds them all."""
    q, k, v = (
        tensor(batch, new, HEADS[0], d),
        tensor(batch, keys, HEADS[1], d),
        tensor(batch, keys, HEADS[1], d),
    )
    filled = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    calls = variants(stock, lambda e: decode(e, q, k, v, filled), 512, 1024, 2048)
    if one_block_fits(d):
        calls["on 2048, one block"] = on(2048, calls["off"], ONE_BLOCK)
    calls["on 2048, apart"] = on(2048, calls["off"], APART)
    if stock and (new > 1 or (batch, keys) == (1, 131072)):
        calls["stock, one split"] = Call(lambda: decode(stock, q, k, v, filled, 1))
    return Case(group, d, batch, new, keys, *HEADS, True, calls)


def drafts(stock: Any, d: int, batch: int, keys: int, group: int) -> Case:
    """A few queries at once, whose heads share tiles; beside tiles for each head."""
    heads_k = max(1, HEADS[0] // group)
    q = tensor(batch, CHECKED, HEADS[0], d)
    k, v = (tensor(batch, keys, heads_k, d) for _ in range(2))
    filled = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    calls = variants(stock, lambda e: decode(e, q, k, v, filled), 512)
    for name, size in (("on", None), ("on 512", 512)):
        calls[f"{name}, own tiles"] = on(size, calls["off"], OWN_TILES)
    return Case("drafts", d, batch, CHECKED, keys, HEADS[0], heads_k, True, calls)


def gradients(stock: Any, d: int, batch: int, length: int, causal: bool) -> Case:
    """Against stock's ``deterministic=True``."""
    inputs, upstream = (
        [tensor(batch, length, HEADS[0], d) for _ in range(3)],
        tensor(batch, length, HEADS[0], d),
    )
    with deterministic_mode():
        results = prefill(flash_attn_2_cuda, *inputs, causal)[:2]

    def call(extension: Any, deterministic: bool) -> Call:
        return Call(lambda: backward(extension, upstream, inputs, results, causal, deterministic))

    calls = {"stock": call(stock, True), "stock, atomics": call(stock, False)} if stock else {}
    calls |= {"off": call(flash_attn_2_cuda, True), "off, atomics": call(flash_attn_2_cuda, False)}
    calls["on"] = on(None, calls["off, atomics"])
    return Case("backward", d, batch, length, length, HEADS[0], HEADS[0], causal, calls)


def million(stock: Any, d: int) -> Case:
    q, k, v = tensor(1, NEW, HEADS[1], d), tensor(1, MILLION, HEADS[1], d), tensor(1, MILLION, HEADS[1], d)
    calls = variants(stock, lambda e: prefill(e, q, k, v, True), 512)
    for name, paths in (("apart", APART), ("tiles of 64 rows", WIDE)):
        calls[f"on 2048, {name}"] = on(2048, calls["off"], paths)
    return Case(
        "million keys",
        d,
        1,
        NEW,
        MILLION,
        HEADS[1],
        HEADS[1],
        True,
        calls,
    )


def cases(group: str, stock: Any, d: int) -> Iterator[Case]:
    if group == "prefill":
        yield from (whole(group, stock, d, *shape, causal) for shape in PREFILL for causal in (False, True))
    elif group == "length":  # the same number of tokens in sequences of every length: what the picture shows
        yield from (whole(group, stock, d, max(1, TOKENS // length), length, False) for length in LENGTHS)
    elif group == "chunked":
        yield from (cached(group, stock, d, 1, NEW, keys + NEW) for keys in CHUNKED)
    elif group == "decode":
        yield from (cached(group, stock, d, batch, 1, keys) for batch, keys in DECODE)
    elif group == "drafts":
        yield from (drafts(stock, d, *shape, size) for size in GROUPS for shape in DRAFTS)
    elif group == "backward":
        yield from (gradients(stock, d, *shape, causal) for shape in PREFILL for causal in (False, True))
    else:
        yield million(stock, d)


def differing_bits(d: int) -> Iterator[dict[str, Any]]:
    """Does a path change a bit? Even shapes, each with and without."""
    paths = {"uneven": UNEVEN, "apart": APART, "in turns": APART | IN_TURNS, "standard": STANDARD} | (
        {"one block": ONE_BLOCK} if one_block_fits(d) else {}
    )
    for batch, len_q, len_k, causal in EVEN:
        q, k, v = (tensor(batch, length, HEADS[1], d) for length in (len_q, len_k, len_k))
        with mode_on(512, 0):
            out, lse = prefill(flash_attn_2_cuda, q, k, v, causal)[:2]
        for name, which in paths.items():
            with mode_on(512, which):
                other_out, other_lse = prefill(flash_attn_2_cuda, q, k, v, causal)[:2]
            differing = (out.view(torch.int16) != other_out.view(torch.int16)).sum() + (
                lse.view(torch.int32) != other_lse.view(torch.int32)
            ).sum()
            shape = {"head_dim": d, "shape": [batch, len_q, len_k], "causal": causal}
            yield shape | {"paths": name, "differing": int(differing), "of": out.numel() + lse.numel()}


# The passes of the kernels that a group calls, by whichever mode.
NEEDED = {
    "prefill": ("fwd", "split"),
    "length": ("fwd", "split"),
    "chunked": ("split",),
    "decode": ("split",),
    "drafts": ("split",),
    "backward": ("split", "bwd"),
    "million keys": ("fwd", "split"),
}


def missing(group: str, d: int) -> list[str]:
    wanted = {f"{needed}_hdim{d}_fp16{causal}" for needed in NEEDED[group] for causal in ("", "_causal")}
    return sorted(wanted - set(fork_info()["kernels"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write every figure here, after each case")
    parser.add_argument("--stock", type=Path, help="an extension of unpatched upstream")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument(
        "--group", choices=NEEDED, nargs="+", default=list(NEEDED), help="which cases (default: all)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.6, help="for each variant of a case (default: 0.6)"
    )
    arguments = parser.parse_args()
    stock = load(arguments.stock) if arguments.stock else None
    set_deterministic_mode(False)  # whatever the environment says
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {
        "format": 1,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "fork": fork_info(),
        "rows": rows,
        "bits": [],
    }

    def keep() -> None:
        if arguments.json:
            write(arguments.json, facts)

    for d in arguments.head_dim:
        for group in arguments.group:
            if absent := missing(group, d):
                print(f"{group} d{d}: this wheel has no {', '.join(absent)}")
                continue
            ratios: dict[str, list[float]] = {}
            for case in cases(group, stock, d):
                figures = measure(case.calls, arguments.seconds)
                base = next(iter(figures.values()))["ms"]
                for name, f in figures.items():
                    own = {key: value for key, value in vars(case).items() if key != "calls"}
                    rows.append(own | {"case": str(case), "variant": name, **f, "ratio": f["ms"] / base})
                    ratios.setdefault(name, []).append(f["ms"] / base)
                keep()
                print(
                    str(case).ljust(34),
                    "  ".join(
                        f"{n} {f['ms']:.4f} ({f['ms'] / base:.2f}, {f['mb']:.0f} MB)"
                        for n, f in figures.items()
                    ),
                    flush=True,
                )
            means = "  ".join(f"{name} {geometric_mean(found):.3f}" for name, found in ratios.items())
            print(f"geometric mean, {group} d{d}:  {means}", flush=True)
        if "prefill" in arguments.group and not missing("prefill", d):
            facts["bits"] += differing_bits(d)
    print(
        "bits that differ with other paths:",
        {f"d{b['head_dim']} {b['shape']} {b['paths']}": b["differing"] for b in facts["bits"]},
    )
    keep()


if __name__ == "__main__":
    main()

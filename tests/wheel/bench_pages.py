"""Time of an installed wheel's kernels on caches in pages: of 16 tokens and up, and without pages.

    python tests/wheel/bench_pages.py --json pages.json [--stock PATH_TO_STOCK_EXTENSION.so]

All variants of a case hold the same keys and values; pages lie in a pool in random order. They alternate in
one process; times are medians of CUDA events in milliseconds (timing.py). The last column is the goal's:
pages of 16 tokens over pages of 256. ``--stock`` takes an extension of upstream (``nox -s build -- --stock``),
which has pages of 256 alone.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench import decode, on, tensor
from extension_files import load
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache, fork_info, set_deterministic_mode
from timing import Call, geometric_mean, measure, write

PAGES = (256, 128, 64, 16)
HEADS = (32, 8)  # of queries, and of keys
DECODE = ((1, 131072), (8, 32768), (64, 4096), (256, 2048))  # sequences, keys
CHUNK, CHUNKED = 512, (1, 16384)  # new tokens, on a cache
PREFILL = (4, 2048)  # packed


@dataclass(frozen=True)
class Problem:
    """The last ``new`` of ``keys`` tokens of each sequence, in every layout: shapes (batch, tokens, heads, d)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def lengths(self) -> torch.Tensor:
        return torch.full((len(self.k),), self.k.shape[1], dtype=torch.int32, device="cuda")

    def paged(self, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(pool of keys, pool of values, table): pages (number, page, heads, d) in random order."""
        batch, keys = self.k.shape[:2]
        table = torch.randperm(batch * keys // page, device="cuda").int().view(batch, -1)
        pools = []
        for one in (self.k, self.v):
            pool = torch.empty_like(one).view(-1, page, *one.shape[2:])
            pool[table.flatten().long()] = one.view_as(pool)
            pools.append(pool)
        return (*pools, table)

    def on_cache(self, page: int | None) -> Call:
        k, v, table = self.paged(page) if page else (self.k, self.v, None)
        lengths = self.lengths()
        return Call(
            lambda: flash_attn_with_kvcache(
                self.q, k, v, cache_seqlens=lengths, block_table=table, causal=True
            )
        )

    def packed(self, page: int | None) -> Call:
        k, v, table = self.paged(page) if page else (self.k.flatten(0, 1), self.v.flatten(0, 1), None)
        sums = [
            torch.arange(len(one) + 1, dtype=torch.int32, device="cuda") * one.shape[1]
            for one in (self.q, self.k)
        ]
        longest = self.q.shape[1], self.k.shape[1]
        return Call(
            lambda: flash_attn_varlen_func(
                self.q.flatten(0, 1), k, v, *sums, *longest, causal=True, block_table=table
            )
        )

    def stock(self, extension: Any) -> Call:
        k, v, table = self.paged(256)
        lengths = self.lengths()
        return Call(lambda: decode(extension, self.q, k, v, lengths, table=table))


def problems(d: int) -> dict[str, Problem]:
    """By name; the packed ones say so in theirs."""
    wanted = [(f"decode {batch} × {keys}", batch, 1, keys) for batch, keys in DECODE]
    wanted += [(f"{CHUNK} new tokens on {CHUNKED[1]}", CHUNKED[0], CHUNK, CHUNKED[1])]
    wanted += [("packed prefill {} × {}".format(*PREFILL), PREFILL[0], PREFILL[1], PREFILL[1])]
    return {
        name: Problem(tensor(batch, new, HEADS[0], d), *(tensor(batch, keys, HEADS[1], d) for _ in range(2)))
        for name, batch, new, keys in wanted
    }


def calls(name: str, problem: Problem, stock: Any) -> dict[str, Call]:
    """Of one case, by variant: the layouts with the mode off, then with it on."""
    layout = problem.packed if "packed" in name else problem.on_cache
    off = {"no pages": layout(None)} | {f"pages of {page}": layout(page) for page in PAGES}
    if stock and "packed" not in name:
        off |= {"stock, pages of 256": problem.stock(stock)}
    return off | {
        f"{variant}, mode on": on(None, call) for variant, call in off.items() if "stock" not in variant
    }


def same_bits(found: dict[str, Call]) -> bool:
    """Whether every layout gives the bits of the one without pages, mode on."""
    results = []
    for variant, call in found.items():
        if variant.endswith("mode on"):
            with call.scope():
                results.append(call.run().view(torch.int16))
    return all(torch.equal(results[0], other) for other in results[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--stock", type=Path, help="an extension of unpatched upstream")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="for each variant of a case (default: 0.3)"
    )
    arguments = parser.parse_args()
    stock = load(arguments.stock) if arguments.stock else None
    set_deterministic_mode(False)  # whatever the environment says
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for d in arguments.head_dim:
        ratios: dict[str, list[float]] = {}
        for name, problem in problems(d).items():
            found = calls(name, problem, stock)
            equal = same_bits(found)
            figures = {variant: figure["ms"] for variant, figure in measure(found, arguments.seconds).items()}
            rows.append({"case": name, "head_dim": d, "ms": figures, "same_bits": equal})
            print(f"d{d} {name}{'' if equal else ': BITS DIFFER'}")
            for mode in ("", ", mode on"):
                whole = figures[f"pages of 256{mode}"]
                told = [
                    f"{v}: {figures[f'{v}{mode}']:.4f}"
                    for v in ("no pages", *(f"pages of {p}" for p in PAGES))
                ]
                ratio = figures[f"pages of 16{mode}"] / whole
                ratios.setdefault(mode, []).append(ratio)
                print(
                    f"   {mode[2:] or 'mode off'}: {'  '.join(told)}   16 over 256: {ratio:.3f}", flush=True
                )
            if "stock, pages of 256" in figures:
                print(f"   stock, pages of 256: {figures['stock, pages of 256']:.4f}")
        for mode, found_ratios in ratios.items():
            mean = geometric_mean(found_ratios)
            print(
                f"geometric mean, d{d}{mode}: pages of 16 over pages of 256: {mean:.3f}, at most {max(found_ratios):.3f}"
            )
    if arguments.json:
        facts = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "fork": fork_info(),
            "rows": rows,
        }
        write(arguments.json, facts)


if __name__ == "__main__":
    main()

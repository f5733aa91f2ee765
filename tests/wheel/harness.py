"""Bits, references and problems for the wheel suite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import flash_attn
import flash_attn_2_cuda
import kernel_names
import pytest
import torch
from bits import Mismatch, Rows, assert_same_bits, bits, joined, same_bits, seed_of
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

__all__ = [
    "Mismatch",
    "Rows",
    "assert_same_bits",
    "bits",
    "joined",
    "same_bits",
    "seed_of",
]  # of bits, for the suite's tests

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DEVICE = "cuda"  # tests/emulator sets another
KERNELS = frozenset(flash_attn.fork_info()["kernels"])


@dataclass(frozen=True)
class Config:
    """Everything about a call but its sequences."""

    head_dim: int = 64
    dtype: str = "fp16"
    heads: int = 8
    heads_k: int = 8
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    mask: bool = False
    bias: str = ""  # a dtype's name: a bias of that type
    sink: str = ""  # and a learnable sink

    def __str__(self) -> str:
        parts = [
            f"d{self.head_dim}",
            self.dtype,
            f"h{self.heads}" + (f"k{self.heads_k}" if self.heads_k != self.heads else ""),
        ]
        parts += ["causal"] * self.causal + [f"window{self.window[0]}.{self.window[1]}"] * (
            self.window != (-1, -1)
        )
        parts += ["softcap"] * (self.softcap > 0) + ["alibi"] * self.alibi
        parts += ["mask"] * self.mask + [f"bias.{self.bias}"] * bool(self.bias)
        parts += [f"sink.{self.sink}"] * bool(self.sink)
        return "-".join(parts)

    def kwargs(self) -> dict[str, Any]:
        slopes = None
        if self.alibi:
            slopes = torch.tensor(
                [2.0 ** (-8 * (i + 1) / self.heads) for i in range(self.heads)], device=DEVICE
            )
        options: dict[str, Any] = {
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "alibi_slopes": slopes,
        }
        if self.sink:  # from one that takes next to nothing to one that takes more than a hundred keys
            sink = 1.3 * torch.arange(self.heads, device=DEVICE) - 3
            options["learnable_sink"] = sink.to(DTYPES[self.sink])
        return options

    def lacks(self, *passes: str) -> list[str]:
        """Kernels that this wheel lacks for causal calls and for the single rows of them."""
        missing = sorted(
            kernel_names.needed(
                self.head_dim, self.dtype, passes, kernel_names.SUFFIXES if self.causal else [""]
            )
            - KERNELS
        )
        return missing + ["attn_mask and attn_bias"] * (
            (self.mask or bool(self.bias)) and not flash_attn_2_cuda.has_attn_bias
        )

    def need(self, *passes: str) -> None:
        """Skip unless the wheel has these kernels."""
        if missing := self.lacks(*passes):
            pytest.skip(f"this wheel has no {', '.join(missing)}")


def of_other_head_dims(**options: Any) -> list[Config]:
    """Cases of head dims besides 64 and 128, in both dtypes, full and causal by turns; 40, 72 and 160 have padding."""
    pairs = [(d, t) for d in (32, 40, 72, 96, 160, 192, 256) for t in ("fp16", "bf16")]
    return [Config(head_dim=d, dtype=t, causal=n % 4 in (1, 2), **options) for n, (d, t) in enumerate(pairs)]


@dataclass(frozen=True)
class Sequence:
    """One sequence: ``q`` (Lq, H, D), ``k`` and ``v`` (Lk, H_k, D), ``mask`` and ``bias`` (H, Lq, Lk) where it has them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def draw(cls, config: Config, len_q: int, len_k: int, generator: torch.Generator) -> Sequence:
        def normal(length: int, heads: int) -> Tensor:
            shape = (length, heads, config.head_dim)
            return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(
                DTYPES[config.dtype]
            )

        q, k, v = normal(len_q, config.heads), normal(len_k, config.heads_k), normal(len_k, config.heads_k)
        shape = (config.heads, len_q, len_k)

        def uniform(*size: int) -> Tensor:
            return torch.rand(size, generator=generator, device=DEVICE)

        mask = bias = None
        if (
            config.mask
        ):  # whole tiles hidden, from all rows or some, and single keys; here and there a row without any
            stripes = uniform(config.heads, -(-len_q // 64), -(-len_k // 128)) < 0.5
            mask = stripes.repeat_interleave(64, 1).repeat_interleave(128, 2)[:, :len_q, :len_k]
            mask = mask & (uniform(*shape) < 0.9) & (uniform(config.heads, len_q, 1) < 0.95)
        if config.bias:
            bias = (4 * uniform(*shape) - 2).to(DTYPES[config.bias])
        return cls(q, k, v, mask, bias)

    def rows(self, start: int, stop: int) -> Sequence:
        """Queries start to stop, with the keys up to where the last of them sits (causal calls)."""
        end = len(self.k) - (len(self.q) - stop)
        mask, bias = (None if t is None else t[:, start:stop, :end] for t in (self.mask, self.bias))
        return replace(self, q=self.q[start:stop], k=self.k[:end], v=self.v[:end], mask=mask, bias=bias)


@dataclass
class Draw:
    """Random sequences from one seed."""

    seed: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(self.seed)

    def sequence(self, config: Config, len_q: int, len_k: int) -> Sequence:
        return Sequence.draw(config, len_q, len_k, self.generator)


# Where the deterministic mode folds chunks, and by which kernel: _test_paths of the extension.
ROUTES = {
    "as the GPU is filled": 0,
    "as for uneven lengths": 1,
    "in one thread block": 2,
    "apart": 4,
    "apart, in turns": 4 | 16,
    "apart, in turns, in tiles of 64 rows": 4 | 16 | 64,
    "apart, each head in its own tiles": 4 | 32,
    "in the standard kernel": 8,
    "in one thread block, in tiles of 64 rows": 2 | 64,
    "apart, in tiles of 64 rows": 4 | 64,
}


@contextmanager
def route(name: str) -> Iterator[None]:
    """Fold chunks there, whatever the shape, where the call allows it; the bits are the same."""
    before = flash_attn_2_cuda._test_paths(ROUTES[name])
    try:
        yield
    finally:
        flash_attn_2_cuda._test_paths(before)


# How one sequence may be laid out in a call. Each returns the rows of the sequence asked for.


def extras(sequences: list[Sequence], keys: int, packed: bool = False) -> dict[str, Tensor]:
    """Mask and bias of a call, with room for so many keys; what no sequence reaches holds True and NaN."""
    found = {}
    for name, filler in (("mask", True), ("bias", math.nan)):
        own = [getattr(s, name) for s in sequences]
        if own[0] is not None:
            wide = [torch.nn.functional.pad(t, [0, keys - t.shape[2]], value=filler) for t in own]
            found[f"attn_{name}"] = torch.cat(wide, dim=1) if packed else torch.stack(wide)
    return found


def dense(config: Config, sequences: list[Sequence], which: int = 0) -> Rows:
    """A batch of sequences of equal lengths."""
    q, k, v = (torch.stack([getattr(s, name) for s in sequences]) for name in "qkv")
    out, lse, _ = flash_attn_func(
        q, k, v, return_attn_probs=True, **config.kwargs(), **extras(sequences, k.shape[1])
    )
    return Rows(out[which], lse[which])


def cu_seqlens(lengths: Iterable[int]) -> Tensor:
    """Where each of the packed sequences of these lengths begins, and where the last ends: int32."""
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def in_pages(
    sequences: list[Sequence], generator: torch.Generator, page: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and their table: pages in random order, a spare one each. Unused slots hold NaN."""
    per_sequence = max(math.ceil(len(s.k) / page) for s in sequences) + 1
    table = torch.randperm(per_sequence * len(sequences), generator=generator, device=DEVICE).to(torch.int32)
    table = table.view(len(sequences), per_sequence)

    def pages(name: str) -> Tensor:
        sample = getattr(sequences[0], name)
        buffer = torch.full(
            (table.numel(), page, *sample.shape[1:]), math.nan, dtype=sample.dtype, device=DEVICE
        )
        for i, sequence in enumerate(sequences):
            for j, part in enumerate(getattr(sequence, name).split(page)):
                buffer[int(table[i, j]), : len(part)] = part
        return buffer

    return pages("k"), pages("v"), table


def varlen(
    config: Config,
    sequences: list[Sequence],
    which: int = 0,
    slack: int = 0,
    slack_q: int = 0,
    pages: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Rows:
    """Sequences packed end to end; ``slack`` and ``slack_q`` are added to the longest key and query lengths that the call names.

    Keys and values may lie in pages instead, which :func:`in_pages` makes.
    """
    len_q, len_k = [len(s.q) for s in sequences], [len(s.k) for s in sequences]
    cu_q, cu_k = cu_seqlens(len_q), cu_seqlens(len_k)
    q, k, v = (torch.cat([getattr(s, name) for s in sequences]) for name in "qkv")
    own = extras(sequences, max(len_k) + slack, packed=True)
    if pages is not None:
        k, v, own["block_table"] = pages
    out, lse, _ = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max(len_q) + slack_q,
        max(len_k) + slack,
        return_attn_probs=True,
        **config.kwargs(),
        **own,
    )
    rows = slice(int(cu_q[which]), int(cu_q[which + 1]))
    return Rows(out[rows], lse[:, rows])


def cache(
    config: Config, sequences: list[Sequence], capacity: int, which: int = 0, poison: float = math.nan
) -> Rows:
    """A KV cache of the given capacity; slots past a sequence's end hold ``poison``."""

    def filled(name: str) -> Tensor:
        sample = getattr(sequences[0], name)
        buffer = torch.full(
            (len(sequences), capacity, *sample.shape[1:]), poison, dtype=sample.dtype, device=DEVICE
        )
        for i, sequence in enumerate(sequences):
            keys = getattr(sequence, name)
            buffer[i, : len(keys)] = keys
        return buffer

    q = torch.stack([s.q for s in sequences])
    lengths = torch.tensor([len(s.k) for s in sequences], dtype=torch.int32, device=DEVICE)
    own = extras(sequences, capacity)
    out, lse = flash_attn_with_kvcache(
        q, filled("k"), filled("v"), cache_seqlens=lengths, return_softmax_lse=True, **config.kwargs(), **own
    )
    return Rows(out[which], lse[which])


def paged(
    config: Config,
    sequences: list[Sequence],
    generator: torch.Generator,
    which: int | slice = 0,
    page: int = 256,
    num_splits: int = 0,
) -> Rows:
    """A paged KV cache; with a slice for ``which`` its sequences stay stacked."""
    k, v, table = in_pages(sequences, generator, page)
    q = torch.stack([s.q for s in sequences])
    lengths = torch.tensor([len(s.k) for s in sequences], dtype=torch.int32, device=DEVICE)
    own = extras(sequences, table.shape[1] * page)
    options = {**config.kwargs(), **own, "num_splits": num_splits, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, **options)
    return Rows(out[which], lse[which])


def reference(
    config: Config,
    sequence: Sequence,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    kept: Tensor | None = None,
    sink: Tensor | None = None,
) -> Rows:
    """Attention by its definition, in ``dtype`` throughout.

    Args:
        config: the call.
        sequence: its sequence.
        rows: only these of the queries.
        dtype: of all operations.
        kept: a factor for each probability (H, Lq, Lk): what dropout leaves.
        sink: in place of the call's.
    """
    len_q, len_k = len(sequence.q), len(sequence.k)
    index = torch.arange(len_q, device=DEVICE) if rows is None else rows
    groups = config.heads // config.heads_k
    q = sequence.q[index].to(dtype).transpose(0, 1)
    k = sequence.k.to(dtype).repeat_interleave(groups, 1).transpose(0, 1)
    v = sequence.v.to(dtype).repeat_interleave(groups, 1).transpose(0, 1)
    scores = q @ k.transpose(1, 2) / math.sqrt(config.head_dim)
    if config.softcap:
        scores = config.softcap * torch.tanh(scores / config.softcap)
    diagonal = (index + len_k - len_q)[:, None]
    column = torch.arange(len_k, device=DEVICE)[None]
    if config.alibi:
        slopes = config.kwargs()["alibi_slopes"].to(dtype)
        bias = -(diagonal - column).abs() if not config.causal else column - diagonal
        scores = scores + slopes[:, None, None] * bias
    if sequence.bias is not None:
        scores = scores + sequence.bias[:, index].to(dtype)
    left, right = config.window
    hidden = torch.zeros(scores.shape, dtype=torch.bool, device=DEVICE)
    if sequence.mask is not None:
        hidden |= ~sequence.mask[:, index]
    if config.causal:
        right = 0
    if left >= 0:
        hidden |= column < diagonal - left
    if right >= 0:
        hidden |= column > diagonal + right
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.double().logsumexp(-1)
    probabilities = scores.softmax(-1).masked_fill(hidden.all(-1)[..., None], 0.0)
    if kept is not None:
        probabilities = probabilities * kept.to(dtype)
    if config.sink:
        sink = config.kwargs()["learnable_sink"] if sink is None else sink
        sum_of_keys = scores.logsumexp(-1)
        probabilities = probabilities * torch.sigmoid(sum_of_keys - sink.to(dtype)[:, None])[..., None]
    return Rows((probabilities @ v).transpose(0, 1), lse)


def assert_accurate(config: Config, got: Rows, sequence: Sequence, rows: Tensor | None = None) -> None:
    """The error against float64 is at most twice that of PyTorch's operations in the input's dtype."""
    exact = reference(config, sequence, rows)
    plain = reference(config, sequence, rows, DTYPES[config.dtype])
    index = slice(None) if rows is None else rows
    error = (got.out[index].double() - exact.out).abs().max().item()
    allowed = 2 * (plain.out.double() - exact.out).abs().max().item() + 1e-5
    assert error <= allowed, f"out is off by {error:.3g}, PyTorch's own error allows {allowed:.3g}"
    lse = got.lse[:, index]
    visible = exact.lse.isfinite()
    assert (lse[~visible] == math.inf).all(), "lse of a row that sees no key is not +inf"
    # ALiBi in a causal call adds slope * column where the reference adds slope * (column - diagonal).
    if visible.any() and not (config.alibi and config.causal):
        off = (lse.double() - exact.lse)[visible].abs().max().item()
        assert off <= 2e-3, f"lse is off by {off:.3g}"

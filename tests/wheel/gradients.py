"""Gradients of one sequence, in calls of several kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import harness
import torch
from flash_attn import deterministic_mode, flash_attn_func, flash_attn_varlen_func
from harness import Config, Draw, Sequence, assert_same_bits, extras, reference, same_bits
from torch import Tensor


@dataclass(frozen=True)
class Gradients:
    """Of one sequence: ``dq`` (Lq, H, D), ``dk`` and ``dv`` (Lk, H_k, D), and ``dbias`` (H, Lq, Lk) where it has a bias."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return (
            (field.name, getattr(self, field.name))
            for field in fields(self)
            if getattr(self, field.name) is not None
        )

    def assert_same(self, other: Gradients, what: str) -> None:
        for name, gradient in self:
            index = "(head, row, key)" if name == "dbias" else "(row, head, dim)"
            assert_same_bits(gradient, getattr(other, name), f"{what}, {name} {index}")

    def same(self, other: Gradients) -> bool:
        return all(same_bits(gradient, getattr(other, name)) for name, gradient in self)


def upstream_of(sequence: Sequence, seed: int) -> Tensor:
    generator = torch.Generator(harness.DEVICE).manual_seed(seed)
    return torch.randn(sequence.q.shape, generator=generator, device=harness.DEVICE).to(sequence.q.dtype)


def leaves(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def _with_bias(
    sequences: list[Sequence], keys: int, packed: bool = False
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Mask and bias of a call, and the bias as a leaf."""
    own = extras(sequences, keys, packed)
    if "attn_bias" in own:
        own["attn_bias"].requires_grad_()
        return own, [own["attn_bias"]]
    return own, []


def dense(
    config: Config, sequences: list[Sequence], upstreams: list[Tensor], which: int, deterministic: bool = True
) -> Gradients:
    q, k, v = leaves(tuple(torch.stack([getattr(s, name) for s in sequences]) for name in "qkv"))
    own, bias = _with_bias(sequences, k.shape[1])
    out = flash_attn_func(q, k, v, deterministic=deterministic, **config.kwargs(), **own)
    return Gradients(*(g[which] for g in torch.autograd.grad(out, (q, k, v, *bias), torch.stack(upstreams))))


def varlen(config: Config, sequences: list[Sequence], upstreams: list[Tensor], which: int) -> Gradients:
    q, k, v = leaves(tuple(torch.cat([getattr(s, name) for s in sequences]) for name in "qkv"))
    starts = [harness.cu_seqlens(len(getattr(s, name)) for s in sequences) for name in "qk"]
    longest = [int(s.diff().max()) for s in starts]
    own, bias = _with_bias(sequences, longest[1], packed=True)
    out = flash_attn_varlen_func(q, k, v, *starts, *longest, deterministic=False, **config.kwargs(), **own)
    dq, dk, dv, *dbias = torch.autograd.grad(out, (q, k, v, *bias), torch.cat(upstreams))
    rows, keys = (slice(int(s[which]), int(s[which + 1])) for s in starts)
    return Gradients(dq[rows], dk[keys], dv[keys], *(g[:, rows, : keys.stop - keys.start] for g in dbias))


def begun_at(tensor: Tensor, first: int, gap: int) -> Tensor:
    """The same values, begun so many elements into a storage, with so many between its rows."""
    *outer, length = tensor.shape
    storage = torch.zeros(first + math.prod(outer) * (length + gap), dtype=tensor.dtype, device=tensor.device)
    rows = storage[first:].view(*outer, length + gap)[..., :length]
    rows.copy_(tensor)
    return rows


def apart(tensor: Tensor) -> Tensor:
    """The same values, of which those of a row lie apart: the first dimension's follow each other."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def overlapping(tensor: Tensor) -> Tensor:
    """Other values: the rows of a token's heads are windows that begin an element after each other."""
    *outer, heads, length = tensor.shape
    tokens = torch.zeros(*outer, heads + length, dtype=tensor.dtype, device=tensor.device)
    tokens[..., :length] = tensor[..., 0, :]
    return tokens.unfold(-1, length, 1)[..., :heads, :]


def assert_that_rows_are_read_alike_wherever_they_lie(config: Config) -> None:
    """Outputs and gradients of queries, keys, values and upstream gradients at any address, with any gaps and overlaps."""
    sequences = [Draw(5).sequence(config, 150, 300), Draw(6).sequence(config, 150, 300)]
    upstream = torch.stack([upstream_of(s, 1) for s in sequences])
    inputs = [torch.stack([getattr(s, name) for s in sequences]) for name in "qkv"]
    starts = [harness.cu_seqlens((length, length)) for length in (150, 300)]

    def calls(*layouts: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
        for packed in (False, True):
            shapes = [t.shape[-2:] if packed else t.shape[1:] for t in (*inputs, upstream)]
            q, k, v, dout = (
                layout(t.reshape(-1, *shape))
                for t, shape, layout in zip((*inputs, upstream), shapes, layouts, strict=True)
            )
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            own, bias = _with_bias(sequences, 300, packed)
            lengths = (*starts, 150, 300) if packed else ()
            with deterministic_mode(split_size=256):
                out = (flash_attn_varlen_func if packed else flash_attn_func)(
                    *leaves, *lengths, **config.kwargs(), **own
                )
            gradients = torch.autograd.grad(out, [*leaves, *bias], dout)
            for name, tensor, like in zip(
                ("out", "dq", "dk", "dv"), (out, *gradients), (q, *leaves), strict=False
            ):
                told = torch.empty_like(
                    like
                )  # torch.compile; where a row's elements would lie apart, they do not
                assert tensor.stride() == (told if told.stride(-1) == 1 else told.contiguous()).stride(), name
            yield f"packed: {packed}", [out, *gradients]

    def at(first: int, gap: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: begun_at(tensor, first, gap)

    def compare(
        layouts: list[Callable[[Tensor], Tensor]], plain: list[Callable[[Tensor], Tensor]], what: str
    ) -> None:
        expected = dict(calls(*plain))
        for call, results in calls(*layouts):
            for n, (result, right) in enumerate(zip(results, expected[call], strict=True)):
                assert_same_bits(result, right, f"{what}, {call}, result {n}")

    aligned = at(0, 0)
    for places in ([(1, 0)] * 4, [(0, 3)] * 4, [(0, 0)] * 3 + [(8, 4)], [(4, 8), (0, 0), (3, 1), (0, 8)]):
        compare([at(*place) for place in places], [aligned] * 4, str(places))
    compare([apart] * 4, [aligned] * 4, "elements apart")
    compare(
        [overlapping] * 3 + [aligned],
        [lambda tensor: overlapping(tensor).contiguous()] * 3 + [aligned],
        "rows that overlap",
    )


def far_along(config: Config, sequence: Sequence, upstream: Tensor, rows: int) -> Gradients:
    """Of a sequence whose queries are the last of so many packed rows, of which nobody computes the others."""

    def last(t: Tensor) -> Tensor:
        whole = torch.empty((rows, *t.shape[1:]), dtype=t.dtype, device=t.device)
        whole[rows - len(t) :] = t
        return whole

    q, (k, v) = last(sequence.q).requires_grad_(), leaves((sequence.k, sequence.v))
    starts = [
        torch.tensor(s, device=harness.DEVICE, dtype=torch.int32)
        for s in ((rows - len(sequence.q), rows), (0, len(k)))
    ]
    out = flash_attn_varlen_func(
        q, k, v, *starts, len(sequence.q), len(k), deterministic=False, **config.kwargs()
    )
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), last(upstream))
    return Gradients(dq[rows - len(sequence.q) :].clone(), dk, dv)


def assert_accurate(config: Config, got: Gradients, sequence: Sequence, upstream: Tensor) -> None:
    """The error against float64 is at most twice that of PyTorch's operations in the input's dtype, or thereabouts."""

    def by_definition(dtype: torch.dtype) -> list[Tensor]:
        inputs = leaves(
            tuple(t for t in (sequence.q, sequence.k, sequence.v, sequence.bias) if t is not None)
        )
        out = reference(config, Sequence(*inputs[:3], sequence.mask, *inputs[3:]), dtype=dtype).out
        return [g.double() for g in torch.autograd.grad(out, inputs, upstream.to(out.dtype))]

    exact, plain = by_definition(torch.float64), by_definition(sequence.q.dtype)
    for (name, gradient), right, other in zip(got, exact, plain, strict=True):
        error = (gradient.double() - right).abs().max().item()
        allowed = 2 * (other - right).abs().max().item() + 2e-3
        assert error <= allowed, f"{name} is off by {error:.3g}, PyTorch's own error allows {allowed:.3g}"

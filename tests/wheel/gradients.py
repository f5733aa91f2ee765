"""Gradients of one sequence, in calls of several kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import flash_attn
import flash_attn_2_cuda
import harness
import pytest
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


FORMS = ("", "varlen_", "kvpacked_", "varlen_kvpacked_", "qkvpacked_", "varlen_qkvpacked_")


def _with_losses(
    config: Config,
    sequences: list[Sequence],
    form: str,
    upstreams: list[Tensor] | None,
    weights: list[Tensor],
) -> Iterator[list[Tensor]]:
    """dq, dk and dv of each sequence, of losses on lse and, with upstreams, on out; by a function of that form."""
    packed = "varlen" in form
    join: Callable[..., Tensor] = torch.cat if packed else torch.stack
    q, k, v = inputs = leaves(tuple(join([getattr(s, name) for s in sequences]) for name in "qkv"))
    tensors, together = [q, k, v], q.dim() - 2
    if "packed" in form:
        first = 0 if "qkv" in form else 1
        tensors[first:] = [torch.stack(tensors[first:], together)]
    starts = [harness.cu_seqlens(len(getattr(s, name)) for s in sequences) for name in "qk"]
    longest = [int(s.diff().max()) for s in starts]
    lengths = [starts[0], longest[0]] if "qkv" in form else [*starts, *longest]
    own, _ = _with_bias(sequences, longest[1], packed)
    out, lse, _ = getattr(flash_attn, f"flash_attn_{form}func")(
        *tensors, *(lengths if packed else []), return_attn_probs=True, **config.kwargs(), **own
    )
    losses = [(lse, torch.cat(weights, 1) if packed else torch.stack(weights))]
    if upstreams is not None:
        losses.append((out, join(upstreams)))
    results, of_results = zip(*losses, strict=True)
    found = torch.autograd.grad(results, inputs, of_results)
    for which in range(len(sequences)):
        rows, keys = (slice(int(s[which]), int(s[which + 1])) for s in starts)
        yield [g[of] if packed else g[which] for g, of in zip(found, (rows, keys, keys), strict=True)]


def assert_that_losses_on_lse_have_gradients(config: Config) -> None:
    """Beside a loss on out and alone; and such calls' other gradients have the bits of calls without."""
    draw = Draw(41)
    sequences = [draw.sequence(config, 90, 90) for _ in range(2)]
    upstreams = [upstream_of(s, n) for n, s in enumerate(sequences)]
    weights = [upstream_of(s, n + 7)[..., 0].float().t() for n, s in enumerate(sequences)]
    for form in FORMS if config.heads == config.heads_k else FORMS[:4]:
        for given in (upstreams, None):
            for which, got in enumerate(_with_losses(config, sequences, form, given, weights)):
                dout = torch.zeros_like(upstreams[which]) if given is None else given[which]
                exact, plain = (
                    _by_definition(config, sequences[which], dout, weights[which], dtype)
                    for dtype in (torch.float64, sequences[which].q.dtype)
                )
                for name, gradient, right, other in zip("qkv", got, exact, plain, strict=True):
                    error = (gradient.double() - right).abs().max().item()
                    allowed = 2 * (other - right).abs().max().item() + 2e-3
                    assert error <= allowed, f"{form}d{name} is off by {error:.3g}; {allowed:.3g} is allowed"


def _by_definition(
    config: Config, sequence: Sequence, dout: Tensor, weights: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    inputs = leaves((sequence.q, sequence.k, sequence.v))
    rows = reference(config, Sequence(*inputs, sequence.mask, sequence.bias), dtype=dtype)
    losses = (rows.out, rows.lse), inputs, (dout.to(rows.out.dtype), weights.to(rows.lse.dtype))
    return [gradient.double() for gradient in torch.autograd.grad(*losses)]


def assert_that_gradients_are_taken_once(config: Config) -> None:
    """A gradient of a gradient is an error that says so; with create_graph alone nothing changes."""
    sequence = Draw(43).sequence(config, 40, 60)
    upstream = upstream_of(sequence, 1)[None]
    for packed in (False, True):
        own, bias = _with_bias([sequence], 60, packed)
        inputs = leaves((sequence.q[None], sequence.k[None], sequence.v[None]))
        if packed:
            lengths = (harness.cu_seqlens([40]), harness.cu_seqlens([60]), 40, 60)
            flat = [tensor[0] for tensor in inputs]
            out = flash_attn_varlen_func(*flat, *lengths, **config.kwargs(), **own)[None]
        else:
            out = flash_attn_func(*inputs, **config.kwargs(), **own)
        plain = torch.autograd.grad(out, [*inputs, *bias], upstream, retain_graph=True)
        kept = torch.autograd.grad(out, [*inputs, *bias], upstream, create_graph=True)
        for name, one, other in zip(("q", "k", "v", "bias"), plain, kept, strict=False):
            assert_same_bits(other, one, f"d{name}, packed: {packed}")
            with pytest.raises(RuntimeError, match="flash_attn's gradients have no gradients of their own"):
                torch.autograd.grad(other.float().square().sum(), inputs, retain_graph=True)


def assert_that_an_lse_is_read_wherever_it_lies(config: Config) -> None:
    """By the extension's backward functions; one of another size is an error."""
    sequences = [Draw(seed).sequence(config, 40, 60) for seed in (1, 2)]
    q, k, v = (torch.stack([getattr(s, name) for s in sequences]) for name in "qkv")
    dout = torch.stack([upstream_of(s, 3) for s in sequences])
    options = (None, 0.0, config.head_dim**-0.5, config.causal, -1, -1, 0.0, True, None)
    out, lse, *_ = flash_attn_2_cuda.fwd(q, k, v, None, *options[:7], False, None)

    def backward(lse: Tensor) -> list[Tensor | None]:
        return flash_attn_2_cuda.bwd(dout, q, k, v, out, lse, None, None, None, *options)[:3]

    for got, expected in zip(backward(apart(lse)), backward(lse), strict=True):
        assert_same_bits(got, expected, "rows of lse apart")
    with pytest.raises(RuntimeError, match=r"softmax_lse must have a number for each head of each query"):
        backward(lse[..., :-1])

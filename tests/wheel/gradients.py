"""Gradients of one sequence, in calls of several kinds."""

from __future__ import annotations

from dataclasses import dataclass

import harness
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from harness import Config, Sequence, assert_same_bits, reference, same_bits
from torch import Tensor


@dataclass(frozen=True)
class Gradients:
    """Of one sequence: ``dq`` (Lq, H, D), ``dk`` and ``dv`` (Lk, H_k, D)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    def assert_same(self, other: Gradients, what: str) -> None:
        for name in ("dq", "dk", "dv"):
            assert_same_bits(getattr(self, name), getattr(other, name), f"{what}, {name} (row, head, dim)")

    def same(self, other: Gradients) -> bool:
        return all(same_bits(getattr(self, name), getattr(other, name)) for name in ("dq", "dk", "dv"))


def upstream_of(sequence: Sequence, seed: int) -> Tensor:
    generator = torch.Generator(harness.DEVICE).manual_seed(seed)
    return torch.randn(sequence.q.shape, generator=generator, device=harness.DEVICE).to(sequence.q.dtype)


def leaves(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def dense(config: Config, sequences: list[Sequence], upstreams: list[Tensor], which: int, deterministic: bool = True) -> Gradients:
    q, k, v = leaves(tuple(torch.stack([getattr(s, name) for s in sequences]) for name in "qkv"))
    out = flash_attn_func(q, k, v, deterministic=deterministic, **config.kwargs())
    return Gradients(*(g[which] for g in torch.autograd.grad(out, (q, k, v), torch.stack(upstreams))))


def varlen(config: Config, sequences: list[Sequence], upstreams: list[Tensor], which: int) -> Gradients:
    q, k, v = leaves(tuple(torch.cat([getattr(s, name) for s in sequences]) for name in "qkv"))
    starts = [torch.tensor([0, *(len(getattr(s, name)) for s in sequences)], device=harness.DEVICE).cumsum(0).to(torch.int32) for name in "qk"]
    longest = [int(s.diff().max()) for s in starts]
    out = flash_attn_varlen_func(q, k, v, *starts, *longest, deterministic=False, **config.kwargs())
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.cat(upstreams))
    rows, keys = (slice(int(s[which]), int(s[which + 1])) for s in starts)
    return Gradients(dq[rows], dk[keys], dv[keys])


def assert_accurate(config: Config, got: Gradients, sequence: Sequence, upstream: Tensor) -> None:
    """The error against float64 is at most twice that of PyTorch's operations in the input's dtype, or thereabouts."""

    def by_definition(dtype: torch.dtype) -> list[Tensor]:
        inputs = leaves((sequence.q, sequence.k, sequence.v))
        out = reference(config, Sequence(*inputs), dtype=dtype).out
        return [g.double() for g in torch.autograd.grad(out, inputs, upstream.to(out.dtype))]

    exact, plain = by_definition(torch.float64), by_definition(sequence.q.dtype)
    for name, right, other in zip(("dq", "dk", "dv"), exact, plain, strict=True):
        error = (getattr(got, name).double() - right).abs().max().item()
        allowed = 2 * (other - right).abs().max().item() + 2e-3
        assert error <= allowed, f"{name} is off by {error:.3g}, PyTorch's own error allows {allowed:.3g}"

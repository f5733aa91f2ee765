"""Masks and biases of every shape, and what they must give."""

from __future__ import annotations

import math

import torch
from harness import Config, Draw, Sequence, reference
from torch import Tensor


def strided(values: Tensor, offset: int, order: tuple[int, ...], gap: int) -> Tensor:
    """The same values, begun so many elements into a storage, with the dimensions in that order there, and gaps between keys."""
    shape = [values.shape[n] for n in order]
    shape[-1] *= gap
    storage = torch.zeros(offset + math.prod(shape), dtype=values.dtype, device=values.device)
    view = storage[offset:].view(shape)[..., ::gap].permute(*sorted(range(len(order)), key=order.__getitem__))
    with torch.no_grad():
        view.copy_(values)
    return view.detach()


def whole(tensor: Tensor, config: Config, size: tuple[int, int, int]) -> Tensor:
    """Expanded to (batch, heads, queries, keys)."""
    if tensor.shape[1] == config.heads_k != config.heads:
        tensor = tensor.repeat_interleave(config.heads // config.heads_k, 1)
    return tensor.expand(size[0], config.heads, *size[1:])


def by_definition(config: Config, dtype: torch.dtype, inputs: list[Tensor], mask: Tensor | None, upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Results and gradients of a dense batch by operations of PyTorch in that type."""
    q, k, v, *bias = leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    size = (q.shape[0], q.shape[1], k.shape[1])
    out = torch.stack(
        [
            reference(
                config,
                Sequence(
                    q[n],
                    k[n],
                    v[n],
                    None if mask is None else whole(mask, config, size)[n],
                    *(whole(t, config, size)[n] for t in bias),
                ),
                dtype=dtype,
            ).out
            for n in range(size[0])
        ]
    )
    return out, list(torch.autograd.grad(out, leaves, upstream.to(dtype)))


def assert_close(what: str, got: Tensor, exact: Tensor, plain: Tensor) -> None:
    assert got.isfinite().all(), what
    error = (got.double() - exact).abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item() + 2e-3 * max(1.0, exact.abs().max().item())
    assert error <= allowed, f"{what} is off by {error:.3g}, PyTorch's own error allows {allowed:.3g}"


def draw_inputs(seed: int, config: Config, batch: int, len_q: int, len_k: int) -> list[Tensor]:
    draw = Draw(seed)
    sequences = [draw.sequence(config, len_q, len_k) for _ in range(batch)]
    return [torch.stack([getattr(s, name) for s in sequences]) for name in "qkv"]

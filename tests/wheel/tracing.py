"""Programs that torch.compile and torch.export trace once, for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import torch
from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from harness import DTYPES, Config, assert_same_bits, cu_seqlens
from torch._dynamo.testing import CompileCounterWithBackend

LENGTHS = (8, 9, 17, 33)
FRAMES = 2  # the first length is taken for the only one
CAPTURED = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


class Program(NamedTuple):
    """A function, and what makes its arguments of a length: shapes of tensors, and others."""

    call: Callable[..., torch.Tensor]
    given: Callable[[int], tuple[Any, ...]]
    has_gradients: bool = True


def _unpadded(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """With padding taken out of tokens (b, n, …) in the program: how many are left depends on data."""

    def program(padded: torch.Tensor, lengths: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        kept = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
        tokens = padded.flatten(0, 1)[kept.flatten().nonzero().flatten()]
        sums = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return call(tokens, sums, lengths.max().item(), *others)

    return program


def _lengths(n: int) -> torch.Tensor:
    return torch.tensor([n, n - 3], dtype=torch.int32, device=harness.DEVICE)


def _sums(n: int) -> torch.Tensor:
    return cu_seqlens([n, n])


PROGRAMS: dict[str, Program] = {
    "lengths": Program(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True),
        lambda n: ((2, n, 4), (2, n + 2, 2), (2, n + 2, 2)),
    ),
    "window": Program(
        lambda q, k, v, left: flash_attn_func(q, k, v, window_size=(left, left + 1)),
        lambda n: ((2, 40, 4), (2, 40, 2), (2, 40, 2), n),
    ),
    "bias": Program(
        lambda q, kv, bias, sink: flash_attn_kvpacked_func(q, kv, attn_bias=bias, learnable_sink=sink),
        lambda n: ((2, n, 4), (2, n, 2, 2), _drawn(4, n, n, seed=7), _drawn(4, seed=8)),
    ),
    "longest": Program(
        lambda q, k, v, sums, n: flash_attn_varlen_func(q, k, v, sums, sums, n, n),
        lambda n: ((80, 4), (80, 2), (80, 2), _sums(n), n),
    ),
    "packed bias": Program(
        lambda q, kv, sums, n, bias: flash_attn_varlen_kvpacked_func(
            q, kv, sums, sums, n, n, causal=True, attn_bias=bias
        ),
        lambda n: ((2 * n, 4), (2 * n, 2, 2), _sums(n), n, _drawn(4, 2 * n, n, seed=7)),
    ),
    "unpadded": Program(
        _unpadded(lambda x, sums, n: flash_attn_varlen_func(*x.unbind(1), sums, sums, n, n, causal=True)),
        lambda n: ((2, n, 3, 4), _lengths(n)),
    ),
    "unpadded with a sink": Program(
        _unpadded(
            lambda x, sums, n, sink: flash_attn_varlen_func(
                *x.unbind(1), sums, sums, n, n, learnable_sink=sink
            )
        ),
        lambda n: ((2, n, 3, 4), _lengths(n), _drawn(4, seed=8)),
    ),
    "unpadded qkv": Program(
        _unpadded(lambda x, sums, n: flash_attn_varlen_qkvpacked_func(x, sums, n, causal=True)),
        lambda n: ((2, n, 3, 4), _lengths(n)),
    ),
    "cache": Program(
        lambda q, k, v, n: flash_attn_with_kvcache(q, k, v, cache_seqlens=n, causal=True) * 1,
        lambda n: ((2, 1, 4), (2, 40, 2), (2, 40, 2), n),
        has_gradients=False,
    ),
    "cache with new keys": Program(
        lambda q, k, v, new, lengths: flash_attn_with_kvcache(
            q, k, v, new, new, cache_seqlens=lengths, causal=True
        ),
        lambda n: ((2, 2, 4), (2, n + 3, 2), (2, n + 3, 2), (2, 2, 2), _lengths(n)),
        has_gradients=False,
    ),
}


def _drawn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(harness.DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=harness.DEVICE)


def arguments(config: Config, named: str, n: int, gradients: bool) -> list[Any]:
    """Of a program, with leaves where gradients are wanted; the same for each call."""
    made = []
    for seed, given in enumerate(PROGRAMS[named].given(n)):
        one = given
        if isinstance(given, tuple):
            one = _drawn(*given, config.head_dim, seed=seed).to(DTYPES[config.dtype])
        floats = isinstance(one, torch.Tensor) and one.is_floating_point()
        made.append(one.requires_grad_(gradients) if floats else one)
    return made


def results(call: Callable[..., torch.Tensor], given: list[Any], gradients: bool) -> list[torch.Tensor]:
    """out, what the call wrote to, and the gradients of leaves."""
    out = call(*given)
    tensors = [one for one in given if isinstance(one, torch.Tensor) and one.is_floating_point()]
    return [out, *(torch.autograd.grad(out.float().square().sum(), tensors) if gradients else tensors)]


def compiled(named: str, backend: str) -> tuple[Callable[..., torch.Tensor], CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(PROGRAMS[named].call, backend=counter, fullgraph=True), counter


def assert_traced_once(config: Config, named: str, backend: str, gradients: bool) -> None:
    """A compiled program gives eager's bits at all lengths, and no length is traced anew."""
    call, counter = compiled(named, backend)
    with torch._dynamo.config.patch(**CAPTURED):
        for n in LENGTHS:
            found, expected = (
                results(one, arguments(config, named, n, gradients), gradients)
                for one in (call, PROGRAMS[named].call)
            )
            for mine, other in zip(found, expected, strict=True):
                assert_same_bits(mine, other, f"{named}, length {n}")
    assert counter.frame_count <= FRAMES

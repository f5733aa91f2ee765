"""Calls that may go straight from the public functions to the library, beside the same calls on the long way.

``return_attn_probs`` and ``return_softmax_lse`` make a call take the long way, or an lse of its own.
"""

from __future__ import annotations

from typing import Any

import harness
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from harness import DTYPES, Config, assert_same_bits, cu_seqlens

LENGTH_Q, LENGTH_K = 9, 21
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "scale": {"softmax_scale": 0.3, "causal": True},
    "softcap": {"softcap": 5.0},
    "slopes": {"slopes": True, "causal": True},
    "ordered": {"deterministic": True},
    "mask": {"mask": True},
    "bias": {"bias": True},
}


def drawn(config: Config, length: int, heads: int, seed: int, gradient: bool = False) -> torch.Tensor:
    generator = torch.Generator(harness.DEVICE).manual_seed(seed)
    shape = (2, length, heads, config.head_dim)
    values = torch.randn(shape, generator=generator, device=harness.DEVICE)
    return values.to(DTYPES[config.dtype]).requires_grad_(gradient)


def arguments(config: Config, named: str, packed: bool = False) -> dict[str, Any]:
    """Of a call with these options: what they stand for on the device."""
    options = dict(OPTIONS[named])
    generator = torch.Generator(harness.DEVICE).manual_seed(5)
    shape = (config.heads, 2 * LENGTH_Q if packed else LENGTH_Q, LENGTH_K)
    if options.pop("slopes", False):
        options["alibi_slopes"] = torch.linspace(0.1, 0.5, config.heads, device=harness.DEVICE)
    if options.pop("mask", False):
        options["attn_mask"] = torch.rand(shape, generator=generator, device=harness.DEVICE) < 0.7
    if options.pop("bias", False):
        bias = torch.randn(shape, generator=generator, device=harness.DEVICE).to(DTYPES[config.dtype])
        options["attn_bias"] = bias.requires_grad_()
    return options


def results(
    config: Config, named: str, packed: bool, gradients: bool, long_way: bool
) -> dict[str, torch.Tensor]:
    """out, and the gradients of what has some."""
    options = arguments(config, named, packed)
    heads = (config.heads, config.heads_k, config.heads_k)
    inputs = [
        drawn(config, length, own, seed, gradients)
        for seed, (length, own) in enumerate(zip((LENGTH_Q, LENGTH_K, LENGTH_K), heads, strict=True))
    ]
    if not gradients and "attn_bias" in options:
        options["attn_bias"] = options["attn_bias"].detach()
    more = {"return_attn_probs": True} if long_way else {}
    if packed:
        lengths = cu_seqlens([LENGTH_Q] * 2), cu_seqlens([LENGTH_K] * 2)
        flat = [t.flatten(0, 1) for t in inputs]
        out = flash_attn_varlen_func(*flat, *lengths, LENGTH_Q, LENGTH_K, **options, **more)
    else:
        out = flash_attn_func(*inputs, **options, **more)
    found = {"out": out[0] if long_way else out}
    if gradients:
        learned = [*inputs, *([options["attn_bias"]] if "attn_bias" in options else [])]
        dout = drawn(config, LENGTH_Q, config.heads, 9).view(found["out"].shape)
        of = torch.autograd.grad(found["out"], learned, dout)
        found |= {f"gradient {place}": gradient for place, gradient in enumerate(of)}
    return found


def assert_ways_agree(config: Config, named: str, packed: bool, gradients: bool) -> None:
    straight, other = (results(config, named, packed, gradients, way) for way in (False, True))
    assert straight.keys() == other.keys()
    for name, tensor in straight.items():
        assert_same_bits(tensor, other[name], f"{named}, {packed=}, {gradients=}: {name}")


def assert_caches_agree(config: Config, named: str) -> None:
    """A tensor of lengths against an int, and a call that wants its lse against one that does not."""
    options = {k: v for k, v in arguments(config, named).items() if k != "deterministic"}
    if "attn_bias" in options:
        options["attn_bias"] = options["attn_bias"].detach()
    q = drawn(config, LENGTH_Q, config.heads, 0)
    k, v = (drawn(config, LENGTH_K, config.heads_k, seed) for seed in (1, 2))
    lengths = torch.full((2,), LENGTH_K - 2, dtype=torch.int32, device=harness.DEVICE)
    plain = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **options)
    by_int = flash_attn_with_kvcache(q, k, v, cache_seqlens=LENGTH_K - 2, **options)
    with_lse, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, return_softmax_lse=True, **options
    )
    assert_same_bits(plain, by_int, f"cache, {named}: an int")
    assert_same_bits(plain, with_lse, f"cache, {named}: with lse")
    assert lse.isfinite().any()

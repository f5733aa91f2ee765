"""Dropout: out and gradients are those of the mask that return_attn_probs gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import problems
from flash_attn import flash_attn_func
from gradients import leaves, upstream_of
from harness import KERNELS, Config, Draw, Sequence, reference
from hypothesis import given
from hypothesis import strategies as st
from test_backward import configs

pytestmark = pytest.mark.skipif(
    not any(name.startswith("bwd") for name in KERNELS), reason="built without backward kernels (--kernels)"
)

P = 0.25


@problems(12)
@given(configs(), st.integers(20, 300), st.integers(20, 300), st.integers(0, 2**31), st.booleans())
def test_out_and_gradients_are_those_of_the_mask(
    config: Config, len_q: int, len_k: int, seed: int, deterministic: bool
) -> None:
    config = replace(config, softcap=0.0, mask=False, bias="")  # these do not go with dropout
    config.need("fwd", "bwd")
    sequence = Draw(seed).sequence(config, len_q, len_k)
    upstream = upstream_of(sequence, 1)
    inputs = leaves((sequence.q, sequence.k, sequence.v))
    batched = [t[None] for t in inputs]
    out, _, signed = flash_attn_func(
        *batched, dropout_p=P, deterministic=deterministic, return_attn_probs=True, **config.kwargs()
    )
    got = [out[0], *torch.autograd.grad(out[0], inputs, upstream)]
    signed = signed[0, :, :len_q, :len_k]  # a probability that was dropped is negative
    kept = ~signed.signbit()

    def by_definition(dtype: torch.dtype) -> list[torch.Tensor]:
        own = leaves((sequence.q, sequence.k, sequence.v))
        out = reference(config, Sequence(*own), dtype=dtype, kept=kept / (1 - P)).out
        return [out, *torch.autograd.grad(out, own, upstream.to(out.dtype))]

    for name, result, exact, plain in zip(
        ("out", "dq", "dk", "dv"),
        got,
        by_definition(torch.float64),
        by_definition(sequence.q.dtype),
        strict=True,
    ):
        error, allowed = ((t.double() - exact).abs().max().item() for t in (result, plain))
        assert error <= 3 * allowed + 1e-4, (
            f"{name} is off by {error:.3g}, PyTorch's own error is {allowed:.3g}"
        )
    seen = signed.abs() > 0
    if seen.sum() > 2000:
        assert abs(kept[seen].double().mean().item() - (1 - P)) < 0.1

"""Log-probabilities of a teacher-forced pass with gradients have the bits of decoding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flash_attn import deterministic_mode
from harness import Config
from training_bits import Model, Shape, compare

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strangers", [0, 3])
def test_training_bits_are_decoding_bits(strangers: int, control: Callable[..., None]) -> None:
    Config(dtype="bf16", causal=True).need("fwd", "split", "bwd")
    model = Model(Shape(), torch.bfloat16, "cuda")
    tokens = torch.randint(model.shape.vocabulary, (700,), device="cuda")
    with deterministic_mode(split_size=256):
        differing, forced = compare(model, tokens, strangers)
        assert differing == 0, f"{differing} of {forced.numel()}"
        forced.gather(1, tokens[1:, None]).sum().backward()
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in model.layers[0].values())
    control(bool(compare(model, tokens, strangers)[0]))

"""How programs call ``flash_attn_2_cuda`` directly: by place, and with what of each argument they give.

Each function makes such a call and asserts that it is answered as the public functions answer.
"""

from __future__ import annotations

from typing import Any

import flash_attn_2_cuda
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from harness import DEVICE, DTYPES, Config, assert_same_bits, cu_seqlens

LENGTHS = [5, 9]


def _packed(config: Config) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(4)

    def normal(heads: int) -> torch.Tensor:
        shape = (sum(LENGTHS), heads, config.head_dim)
        return torch.randn(shape, generator=generator, device=DEVICE).to(DTYPES[config.dtype])

    return [normal(heads) for heads in (config.heads, config.heads_k, config.heads_k)], normal(config.heads)


def text_generation_inference(config: Config) -> None:
    """A prefill of packed prompts into an output of the caller's, ints where floats are, nothing for the generator."""
    (q, k, v), _ = _packed(config)
    lengths = cu_seqlens(LENGTHS)
    out = torch.empty_like(q)
    results = flash_attn_2_cuda.varlen_fwd(
        q, k, v, out, lengths, lengths, None, None, None, None,
        max(LENGTHS), max(LENGTHS), 0, config.head_dim**-0.5, False, True, -1, 0, 0, False, None,
    )  # fmt: skip
    assert isinstance(results, list)
    assert results[0] is out
    expected = flash_attn_varlen_func(q, k, v, lengths, lengths, max(LENGTHS), max(LENGTHS), causal=True)
    assert_same_bits(out, expected, "text-generation-inference's prefill")


def transformer_engine(config: Config) -> None:
    """Gradients of packed sequences into tensors of the caller's, with a random state that no dropout needs."""
    (q, k, v), dout = _packed(config)
    lengths = cu_seqlens(LENGTHS)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out, lse, _ = flash_attn_varlen_func(
        *inputs, lengths, lengths, max(LENGTHS), max(LENGTHS), causal=True, deterministic=True,
        return_attn_probs=True,
    )  # fmt: skip
    expected = torch.autograd.grad(out, inputs, dout)
    gradients = [torch.empty_like(t) for t in inputs]
    with torch.no_grad():
        results: list[Any] = flash_attn_2_cuda.varlen_bwd(
            dout, q, k, v, out, lse, *gradients, lengths, lengths, None, max(LENGTHS), max(LENGTHS),
            0, config.head_dim**-0.5, False, True, -1, -1, 0, True, None,
            torch.zeros(2, dtype=torch.int64, device=DEVICE),
        )  # fmt: skip
    for name, mine, result, other in zip(("dq", "dk", "dv"), gradients, results, expected, strict=False):
        assert result is mine, name
        assert_same_bits(mine, other, f"TransformerEngine's {name}")


def gpt_neox(config: Config) -> None:
    """What a caller of upstream's ``fwd`` unpacks: four results, of which the last is the random state."""
    (q, k, v), _ = _packed(config)
    out, lse, probabilities, rng_state = flash_attn_2_cuda.fwd(
        q[None], k[None], v[None], None, None, 0.0, config.head_dim**-0.5, True, -1, -1, 0.0, False, None
    )
    assert lse.dtype == torch.float32
    assert probabilities.numel() == 0
    assert rng_state.dtype == torch.int64
    assert_same_bits(out, flash_attn_func(q[None], k[None], v[None], causal=True), "gpt-neox's forward")


CALLERS = {
    function.__name__: function for function in (text_generation_inference, transformer_engine, gpt_neox)
}

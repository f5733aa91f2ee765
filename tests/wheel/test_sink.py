"""learnable_sink: results and gradients, and where it joins. The rows' contract with it is in test_contract.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sinks
import torch
from flash_attn import deterministic_mode, flash_attn_func, flash_attn_varlen_func, set_deterministic_mode
from harness import (
    ROUTES,
    Config,
    Draw,
    Sequence,
    assert_accurate,
    assert_same_bits,
    cache,
    dense,
    of_other_head_dims,
    paged,
    reference,
    route,
    seed_of,
    varlen,
)

pytestmark = pytest.mark.gpu

CONFIGS = [
    Config(sink="fp32", heads=8, heads_k=2, causal=True),
    Config(sink="fp16", heads=4, heads_k=4),
    Config(sink="bf16", head_dim=128, dtype="bf16", heads=4, heads_k=1, causal=True),
    Config(sink="bf16", head_dim=128, dtype="bf16", heads=4, heads_k=4, window=(100, 0)),
    Config(sink="fp32", head_dim=40, heads=4, heads_k=2, softcap=15.0),
    Config(sink="fp32", head_dim=72, dtype="bf16", heads=4, heads_k=2, alibi=True),
]
OTHERS = of_other_head_dims(sink="fp32", heads=4, heads_k=2)
configs = pytest.mark.parametrize("config", [*CONFIGS, *OTHERS], ids=str)
modes = pytest.mark.parametrize("mode", [False, True], ids=["off", "on"])


@configs
@modes
def test_no_sink_is_one_of_minus_infinity(config: Config, mode: bool) -> None:
    config.need("fwd", "split", "bwd")
    draw = Draw(seed_of(config))
    plain = replace(config, sink="")
    with deterministic_mode(mode, 256):
        sinks.assert_that_no_sink_is_a_sink_of_minus_infinity(
            plain, [draw.sequence(plain, 200, 700), draw.sequence(plain, 200, 700)]
        )


@configs
@modes
@pytest.mark.parametrize("lengths", [((200, 700), (200, 700)), ((1, 300), (130, 129), (64, 1000))], ids=str)
def test_gradients(config: Config, mode: bool, lengths: tuple[tuple[int, int], ...]) -> None:
    config.need("fwd", "split", "bwd")
    draw = Draw(seed_of(config, lengths))
    with deterministic_mode(mode, 256):
        sinks.assert_that_gradients_are_right(config, [draw.sequence(config, *pair) for pair in lengths])


@configs
@pytest.mark.parametrize("len_k", [1, 127, 700, 9000])
@pytest.mark.parametrize("len_q", [1, 3, 130])
def test_a_cache_with_the_mode_off(config: Config, len_q: int, len_k: int) -> None:
    """Where keys are split, upstream's own kernel combines; a single query of several heads is one block's rows."""
    config.need("split")
    draw = Draw(seed_of(config, len_q, len_k))
    sequences = [draw.sequence(config, len_q, length) for length in (len_k, len_k + 70)]
    for which, sequence in enumerate(sequences):
        assert_accurate(config, cache(config, sequences, len_k + 300, which), sequence)
        assert_accurate(config, paged(config, sequences, draw.generator, which, page=16), sequence)
        assert_accurate(config, varlen(config, sequences, which), sequence)


@configs
@pytest.mark.parametrize("name", ROUTES)
def test_it_joins_alike_wherever_a_row_ends(config: Config, name: str) -> None:
    config.need("fwd", "split")
    sequence = Draw(seed_of(config, name)).sequence(config, 150, 1500)
    with deterministic_mode(split_size=256):
        expected = dense(config, [sequence])
        with route(name):
            dense(config, [sequence]).assert_same(expected, name)
    assert_accurate(config, expected, sequence)


def test_beside_a_mask_and_a_bias() -> None:
    """Gradients of all: by test_gradients.py's configurations those of q, k, v and the bias; here the sink's."""
    config = Config(heads=4, heads_k=2, sink="fp32", mask=True, bias="fp16")
    config.need("fwd", "split", "bwd")
    sequence = Draw(8).sequence(config, 150, 400)
    leaves = [t[None].requires_grad_() for t in (sequence.q, sequence.k, sequence.v)]
    sink = config.kwargs()["learnable_sink"].requires_grad_()
    own = {"attn_mask": sequence.mask, "attn_bias": sequence.bias}
    out = flash_attn_func(*leaves, learnable_sink=sink, **own)
    dout = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, sink, dout)
    exact = sink.detach().double().requires_grad_()
    inputs = [t.double() for t in (sequence.q, sequence.k, sequence.v)]
    right = reference(config, Sequence(*inputs, sequence.mask, sequence.bias), sink=exact).out
    (expected,) = torch.autograd.grad(right, exact, dout[0].double())
    torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_unused_rows_have_no_part() -> None:
    config = CONFIGS[0]
    config.need("fwd", "split", "bwd")
    sinks.assert_that_unused_rows_have_no_part(config)


@configs
def test_all_functions_take_one(config: Config) -> None:
    config.need("fwd", "split")
    sinks.assert_that_all_functions_take_one(config)


def test_wrong_sinks_are_told() -> None:
    config = Config(heads=4, heads_k=2)
    config.need("fwd", "split")
    sinks.assert_that_wrong_sinks_are_told(config)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_compiled_whole(packed: bool) -> None:
    config = CONFIGS[0]
    config.need("fwd", "split", "bwd")
    set_deterministic_mode(True, 256)  # which compiled gradients obey; without it sums come in any order
    draw = Draw(1)
    sequences = [draw.sequence(config, 100, 300), draw.sequence(config, 100, 300)]
    sink = config.kwargs()["learnable_sink"].requires_grad_()
    out, _, leaves = sinks.call(config, sequences, packed, learnable_sink=sink)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, [*leaves, sink], dout)
    lengths = (sinks.cu_seqlens([100, 100]), sinks.cu_seqlens([300, 300]), 100, 300) if packed else ()
    function = flash_attn_varlen_func if packed else flash_attn_func
    compiled = torch.compile(
        lambda *tensors: function(*tensors[:3], *lengths, causal=True, learnable_sink=tensors[3]),
        fullgraph=True,
    )
    result = compiled(*leaves, sink)
    assert_same_bits(result, out, "out")
    for name, got, right in zip(
        ("dq", "dk", "dv", "dsink"), torch.autograd.grad(result, [*leaves, sink], dout), expected, strict=True
    ):
        assert_same_bits(got, right, name)


def test_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' model of random weights: its own attention, eager, against ours.

    Transformers hands sinks to a flash_attn_func that has learnable_sink, and asks of this model that the
    kernels are on a list of its own.
    """
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(
        transformers.GptOssForCausalLM, "_compatible_flash_implementations", None, raising=False
    )
    config = Config(heads=8, heads_k=2, dtype="bf16", causal=True)
    config.need("fwd", "split")
    torch.manual_seed(0)
    settings = transformers.GptOssConfig(
        num_hidden_layers=2, hidden_size=256, intermediate_size=256, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, sliding_window=32, vocab_size=500, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"], initializer_range=0.1,
    )  # fmt: skip
    settings._attn_implementation = "eager"
    model = transformers.GptOssForCausalLM(settings).to("cuda", torch.bfloat16).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    tokens = torch.randint(0, 500, (2, 150), device="cuda")
    with torch.no_grad():
        exact = model.float()(tokens).logits.double()
        plain = model.bfloat16()(tokens).logits
        model.set_attn_implementation("flash_attention_2")
        ours = model(tokens).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
        without = model(tokens).logits
    error, allowed = ((one.double() - exact).norm().item() for one in (ours, plain))
    assert error <= 2 * allowed + 1e-6, (error, allowed)
    assert (without.double() - exact).norm().item() > 2 * error, "the sinks were not used"

"""Transformers' models on flash_attn.serving.transformers: random weights, its own eager attention beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_attn.serving import transformers as ours
from harness import Config

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16


@pytest.fixture
def transformers() -> Any:
    """The package; in a fixture, so that the suite has these cases where it is missing too."""
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture
def calls(transformers: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What flash_attn_func was called with."""
    found: list[dict[str, Any]] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        found.append(options)
        return real(*arguments, **options)

    real = ours.flash_attn_func
    ours.register()
    monkeypatch.setattr(ours, "flash_attn_func", noted)
    return found


def logits(model: Any, implementation: str, dtype: torch.dtype, **inputs: Any) -> torch.Tensor:
    """Its parts have configurations of their own."""
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = implementation
    with torch.no_grad():
        return model.to("cuda", dtype).eval()(**inputs).logits.double()


def assert_as_accurate_as_eager(model: Any, calls: list[dict[str, Any]], **inputs: Any) -> None:
    """The error against float32 is at most twice that of Transformers' own attention; padding does not count."""
    Config(dtype="bf16").need("fwd", "split")
    Config(dtype="bf16", causal=True).need("fwd", "split")
    model = model.to("cuda", DTYPE)
    plain = logits(model, "eager", DTYPE, **inputs)
    exact = logits(model, "eager", torch.float32, **inputs)
    got = logits(model, ours.NAME, DTYPE, **inputs)
    assert calls, "the model did not call the attention"
    rows = torch.ones(exact.shape[:-1], dtype=torch.bool, device="cuda")
    if "decoder_input_ids" not in inputs and "attention_mask" in inputs:
        rows = inputs["attention_mask"].bool()
    error, allowed = ((one - exact)[rows].norm().item() for one in (got, plain))
    assert error <= 2 * allowed, (error, allowed)


def padding(left: bool) -> torch.Tensor:
    """Of two prompts of 150 tokens, the second of 90."""
    mask = torch.ones(2, 150, dtype=torch.long, device="cuda")
    mask[1, slice(60) if left else slice(90, None)] = 0
    return mask


def prompt() -> torch.Tensor:
    return torch.randint(1, 500, (2, 150), device="cuda")


SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 500,
}


@pytest.mark.parametrize("padded", ["", "left", "right"])
def test_llama(transformers: Any, padded: str, calls: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    own = {"attention_mask": padding(padded == "left")} if padded else {}
    assert_as_accurate_as_eager(model, calls, input_ids=prompt(), **own)
    assert all(("attn_mask" in call) == bool(padded) and ("causal" in call) != bool(padded) for call in calls)


def test_a_window_is_the_kernels_own(transformers: Any, calls: list[dict[str, Any]]) -> None:
    torch.manual_seed(1)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=32))
    assert_as_accurate_as_eager(model, calls, input_ids=prompt())
    assert all("attn_mask" not in call and call["window_size"] == (31, 31) for call in calls)


def test_a_window_that_layers_do_not_tell_is_a_mask(transformers: Any, calls: list[dict[str, Any]]) -> None:
    """Phimoe's layers leave theirs to the mask."""
    torch.manual_seed(5)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**sizes, **experts, sliding_window=32))
    assert_as_accurate_as_eager(model, calls, input_ids=prompt())
    assert all("attn_mask" in call for call in calls)


def test_chunks_are_no_window(transformers: Any) -> None:
    """Transformers tells of attention in chunks as of a window."""
    from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

    chunks = chunked_causal_mask_function(32, torch.zeros(1, dtype=torch.int))
    window = sliding_window_causal_mask_function(32)
    assert not hasattr(ours.mask(1, 100, 100, mask_function=chunks, local_size=32), "window")
    assert getattr(ours.mask(1, 100, 100, mask_function=window, local_size=32), "window", None) == 32
    assert ours.mask(1, 30, 30, mask_function=window, local_size=32) is None


@pytest.mark.parametrize(
    ("tokens", "keys", "offset", "held", "padded"),
    [
        (100, 100, 0, [1] * 100, False),
        (20, 100, 0, [1] * 100, False),
        (100, 100, 0, [0] * 10 + [1] * 140, True),  # of which the last 100 are no padding
        (20, 20, 0, [1] * 10, True),  # it ends before the keys do
        (20, 60, 40, [0] * 40 + [1] * 60, False),
    ],
)
def test_padding_is_that_of_the_keys(
    transformers: Any, tokens: int, keys: int, offset: int, held: list[int], padded: bool
) -> None:
    found = ours.mask(
        1, tokens, keys, q_offset=offset + keys - tokens, kv_offset=offset,
        attention_mask=torch.tensor([held]).bool(),
    )  # fmt: skip
    assert (found is not None) == padded


def test_t5_s_bias(transformers: Any, calls: list[dict[str, Any]]) -> None:
    torch.manual_seed(2)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=256,
            d_kv=64,
            d_ff=256,
            num_layers=2,
            num_heads=4,
            vocab_size=500,
            decoder_start_token_id=0,
        )
    )
    target = torch.randint(1, 500, (2, 40), device="cuda")
    assert_as_accurate_as_eager(
        model, calls, input_ids=prompt(), attention_mask=padding(left=False), decoder_input_ids=target
    )
    assert any("attn_bias" in call for call in calls)


@pytest.mark.parametrize("padded", [False, True])
def test_gpt_oss_s_sinks(transformers: Any, padded: bool, calls: list[dict[str, Any]]) -> None:
    torch.manual_seed(3)
    model = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SIZES, sliding_window=32, num_local_experts=4, num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"],
        )
    )  # fmt: skip
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    own = {"attention_mask": padding(left=True)} if padded else {}
    assert_as_accurate_as_eager(model, calls, input_ids=prompt(), **own)
    assert all("learnable_sink" in call for call in calls)


def test_generation_is_the_same_tokens_as_at_once(transformers: Any, calls: list[dict[str, Any]]) -> None:
    """Greedy tokens of a cache that grows are those of the whole text in one pass, where no two are close."""
    Config(dtype="bf16", causal=True).need("fwd", "split")
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to("cuda", DTYPE).eval()
    model.set_attn_implementation(ours.NAME)
    tokens = prompt()[:1]
    text = model.generate(tokens, max_new_tokens=20, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        best = model(text).logits[0, tokens.shape[1] - 1 : -1].float()
    chosen = best.gather(1, text[0, tokens.shape[1] :, None]).squeeze(1)
    assert (best.max(-1).values - chosen <= 0.05).all()
    assert all("attn_mask" not in call for call in calls)

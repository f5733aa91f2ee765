"""SGLang's backend on kernels that run here: its classes, its metadata and its pools are SGLang's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DIM, built
from harness import Config, Mismatch, Sequence

pytest.importorskip("sglang", reason="SGLang is not installed")

import serving
import serving_sglang
from flash_attn.serving import sglang as plugin

LENGTHS = (530, 70, 300)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plugin.register()
    plugin.register()  # again, it does nothing
    serving.use_small_splits(monkeypatch)
    with serving_sglang.arguments():
        yield


def requests(config: Config) -> list[Sequence]:
    return serving.requests(config, LENGTHS, seed=7)


CONFIGS = [
    built(heads=2, heads_k=2, causal=True),
    built(heads=4, heads_k=1, causal=True),
    built(heads=2, heads_k=1, causal=True, window=(90, 0), sink="fp32"),
    built(heads=2, heads_k=1, causal=True, softcap=20.0, sink="bf16"),
]


@pytest.mark.parametrize("page", [16, 48, 256])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_of_steps_are_those_of_requests_alone(config: Config, page: int) -> None:
    engine = serving_sglang.Engine(config, requests(config), page)
    serving.assert_steps(engine, serving.mixed_steps(LENGTHS))


def test_without_the_mode_rows_depend_on_the_step() -> None:
    """The negative control."""
    engine = serving_sglang.Engine(CONFIGS[1], requests(CONFIGS[1]), 16)
    engine.backend.scope = (False, 0)
    with pytest.raises(Mismatch):
        serving.assert_steps(engine, serving.mixed_steps(LENGTHS))


def test_new_keys_are_written() -> None:
    engine = serving_sglang.Engine(CONFIGS[0], requests(CONFIGS[0]), 16)
    for cache in engine.runner.token_to_kv_pool.get_kv_buffer(serving_sglang.LAYER):
        cache.fill_(0)
    parts = [serving.Part(0, start, stop) for start, stop in ((0, 100), (100, 101), (101, 300))]
    serving.assert_steps(engine, [[part] for part in parts])


def refusal(page: int = 16, options: dict[str, Any] | None = None, **other: Any) -> str:
    from flash_attn.serving.sglang_backend import Backend

    with serving_sglang.arguments(**(options or {})):
        made = serving_sglang.runner(CONFIGS[0], 16, 64, 1, CPU, **(other | {"page_size": page}))
        with pytest.raises(ValueError, match=f"--attention-backend {plugin.NAME}: ") as refused:
            Backend(made)
    return str(refused.value)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"use_mla_backend": True}, "multi-head latent attention (MLA)"),
        ({"page": 1}, "not 1: pass --page-size 16"),
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "not torch.float8_e5m2"),
        ({"model": {"head_dim": 320, "v_head_dim": 320}}, "multiples of 8 up to 256, not 320"),
        ({"model": {"head_dim": 64, "v_head_dim": 64}}, "no kernels split_hdim64_fp16, split_hdim64_fp16_causal"),
        ({"model": {"v_head_dim": 16}}, f"one head dim, not {DIM} and 16"),
        ({"model": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model": {"is_local_attention_model": True}}, "chunks of a sequence"),
        ({"model": {"swa_head_dim": 320, "swa_v_head_dim": 320}}, "multiples of 8 up to 256, not 320"),
        ({"options": {"speculative_algorithm": "NGRAM"}}, "leave out --speculative-algorithm NGRAM"),
        ({"prefill_aware_swa": True}, "windows that know of the prefill"),
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_serve_is_refused_as_the_engine_starts(
    asked: dict[str, Any], words: str
) -> None:
    assert words in refusal(**asked)


def test_a_cache_in_another_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert "unset SGLANG_USE_HND_KVCACHE" in refusal()


def test_layers_that_see_ahead_in_part_are_refused() -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    engine = serving_sglang.Engine(CONFIGS[0], requests(CONFIGS[0]), 16)
    engine.layer.attn_type = AttentionType.DECODER_BIDIRECTIONAL
    with pytest.raises(NotImplementedError, match="in both directions in part"):
        engine.step([serving.Part(0, 0, 9)])


def test_layers_that_ask_for_more_are_refused() -> None:
    engine = serving_sglang.Engine(CONFIGS[0], requests(CONFIGS[0]), 16)
    with pytest.raises(NotImplementedError, match="layers that pass rel_bias"):
        engine.backend.forward_extend(
            None, None, None, engine.layer, None, rel_bias=torch.zeros(1), q_rope=None
        )


def test_sglang_s_lists_have_it_once() -> None:
    from sglang.srt import server_args

    for name in (
        "ATTENTION_BACKEND_CHOICES",
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
    ):
        assert getattr(server_args, name).count(plugin.NAME) == 1


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("chosen", "given", "page"), [(plugin.NAME, None, 16), (plugin.NAME, 64, 64), ("fa3", None, 1)]
)
def test_arguments_keep_the_cache_of_prefixes_and_have_pages_that_kernels_read(
    tmp_path: Path, chosen: str, given: int | None, page: int
) -> None:
    """In a process of its own, as SGLang loads plugins: once, with its own classes patched."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    words = ["--model-path", str(tmp_path), "--attention-backend", chosen, "--enable-deterministic-inference"]
    words += ["--device", "cuda", "--skip-tokenizer-init"] + [f"--page-size={given}"] * (given is not None)
    code = (
        "from flash_attn.serving import sglang as plugin\n"
        "from sglang.srt.plugins import load_plugins\n"
        "plugin.register(); load_plugins()\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        f"arguments = prepare_server_args({words!r})\n"
        "print(arguments.attention_backend, arguments.page_size, arguments.disable_radix_cache)\n"
    )
    assert child(code) == f"{chosen} {page} False"


def child(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_flash_attn_and_its_plugin_import_no_sglang() -> None:
    code = "import sys, flash_attn, flash_attn.serving.sglang\nprint([m for m in sys.modules if m.split('.')[0] == 'sglang'])"
    assert child(code) == "[]"


def test_another_sglang_is_refused_in_a_line_where_the_backend_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    monkeypatch.setattr(plugin, "version", lambda _: "0.5.99")
    with pytest.raises(plugin.UnfitVersionError) as refused:
        ATTENTION_BACKENDS[plugin.NAME](None)
    assert str(refused.value) == (
        "flash_attn's attention backend fits SGLang 0.5.16, and this is SGLang 0.5.99: "
        "pip install 'sglang==0.5.16', or choose another attention backend."
    )

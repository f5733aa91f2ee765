"""vLLM's backend on kernels that run here: its classes, its metadata and its cache are vLLM's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flash_attn
import flash_attn_2_cuda
import pytest
import torch
from conftest import DIM, HALF, built
from harness import Config, Mismatch, Sequence
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

import prove_vllm
import run_vllm_tests
import serving
import serving_engine
from flash_attn.serving import kernels
from flash_attn.serving import vllm as plugin

LENGTHS = (530, 70, 300)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    plugin.register()  # twice: again, it does nothing
    return serving.chosen_backend(monkeypatch)


def requests(config: Config) -> list[Sequence]:
    return serving.requests(config, LENGTHS, seed=7)


CONFIGS = [
    built(heads=2, heads_k=2, causal=True),
    built(heads=4, heads_k=1, causal=True),
    built(heads=2, heads_k=1, causal=True, window=(90, 0), sink="fp32"),
    built(heads=2, heads_k=1, causal=True, softcap=20.0, sink="bf16"),
    built(heads=2, heads_k=1, causal=True, alibi=True),
]


@pytest.mark.parametrize(("page", "layout"), [(16, "NHD"), (48, "HND"), (256, "NHD")])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_of_steps_are_those_of_requests_alone(
    backend: Any, config: Config, page: int, layout: str
) -> None:
    engine = serving.Engine(backend, config, requests(config), page, layout)
    serving.assert_steps(engine, serving.mixed_steps(LENGTHS))


def test_without_the_mode_rows_depend_on_the_step(backend: Any) -> None:
    """The negative control."""
    engine = serving.Engine(backend, CONFIGS[1], requests(CONFIGS[1]), 16)
    engine.layer.scope = (False, 0)
    with pytest.raises(Mismatch):
        serving.assert_steps(engine, serving.mixed_steps(LENGTHS))


@pytest.mark.parametrize("rows", [1, 3], ids=["decode", "drafts"])
@pytest.mark.parametrize("config", CONFIGS[1:3], ids=str)
def test_steps_as_graphs_are_captured(backend: Any, config: Config, rows: int) -> None:
    """Padded, and with room for as many keys as the pages of a request hold."""
    engine = serving.Engine(backend, config, requests(config), 16)
    parts = [serving.Part(n, length - rows, length) for n, length in enumerate(LENGTHS)]
    metadata = engine.metadata(parts, padding=rows * 2, captured=True)
    assert metadata.max_seq_len == engine.table.shape[1] * 16
    serving.assert_steps(engine, [parts], padding=rows * 2, captured=True)


def test_the_mode_of_the_process_is_the_program_s(backend: Any) -> None:
    config = CONFIGS[0]
    engine = serving.Engine(backend, config, requests(config), 16)
    flash_attn.set_deterministic_mode(False)
    engine.step([serving.Part(0, 0, 40)])
    assert not flash_attn.get_deterministic_mode().enabled
    assert flash_attn_2_cuda.deterministic_scope.get() is None


def refusals(backend: Any, **other: Any) -> list[str]:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    asked = {"head_size": DIM, "dtype": HALF, "kv_cache_dtype": "auto", "block_size": 16}
    asked |= {
        "has_sink": True,
        "has_sliding_window": True,
        "use_batch_invariant": True,
        "use_non_causal": True,
    }
    capability = DeviceCapability(*other.pop("capability", (9, 0)))
    configuration = AttentionSelectorConfig(**(asked | other))
    reasons: list[str] = backend.validate_configuration(
        device_capability=capability, **configuration._asdict()
    )
    return reasons


def test_what_the_kernels_serve_is_taken(backend: Any) -> None:
    for head_size in (DIM, DIM - 8):
        for page in (16, 48, 1024, None):
            assert refusals(backend, head_size=head_size, block_size=page) == []
    assert refusals(backend, kv_cache_dtype=None) == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"kv_cache_dtype": "fp8"}, "not fp8"),
        ({"kv_cache_dtype": "bfloat16", "dtype": torch.float16}, "torch.float16, not bfloat16"),
        ({"head_size": 320}, "multiples of 8 up to 256, not 320"),
        ({"head_size": 36}, "multiples of 8 up to 256, not 36"),
        ({"head_size": 64}, "no kernels split_hdim64_fp16, split_hdim64_fp16_causal"),
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"block_size": 8}, "block_size not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales"),
        ({"use_pcp": True}, "PCP"),
        ({"capability": (7, 5)}, "compute capability"),
    ],
)
def test_what_they_do_not_serve_is_refused_by_name(backend: Any, asked: dict[str, Any], words: str) -> None:
    assert any(words in reason for reason in refusals(backend, **asked))


def test_a_gpu_that_the_wheel_was_not_built_for_is_refused(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_for = {"architectures": ["80", "90a"], "nvcc": {"flags": ["-gencode=arch=compute_80,code=sm_80"]}}
    monkeypatch.setattr(kernels, "fork_info", lambda: built_for)
    for capability in ((8, 0), (8, 9), (9, 0)):
        assert refusals(backend, capability=capability) == []
    refused = "this wheel of flash_attn is for sm_80, sm_90a, and the GPU has compute capability 12.0"
    assert refusals(backend, capability=(12, 0)) == [refused]
    built_for["nvcc"]["flags"] = ["-gencode=arch=compute_90,code=compute_90"]
    assert refusals(backend, capability=(12, 0)) == []


def test_layers_refuse_what_vllm_does_not_ask_about(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[backend.__module__]
    arguments = (2, DIM, 1.0, 1, None, None, "auto")
    with pytest.raises(ValueError, match=r"sinks have shape \(3,\), not \(2,\)"):
        module.Attention(*arguments, sinks=torch.zeros(3))
    config = serving.vllm_config(CONFIGS[0])
    monkeypatch.setattr(module, "get_current_vllm_config_or_none", lambda: config)
    module.Attention(*arguments)
    config.model_config.is_diffusion = True
    with pytest.raises(ValueError, match="diffusion"):
        module.Attention(*arguments)
    config.model_config.is_diffusion, config.model_config.rswa_window = False, 128
    with pytest.raises(ValueError, match="reference sliding window"):
        module.Attention(*arguments)
    monkeypatch.setattr(flash_attn_2_cuda, "check_split_size", lambda _: 192)
    config.model_config.rswa_window = None
    with pytest.raises(ValueError, match="FA2_SPLIT_SIZE=192 is no multiple of 128"):
        module.Attention(*arguments)


def test_values_of_another_head_size_are_refused(backend: Any) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=DIM, dtype=HALF, head_size_v=16)
    with pytest.raises(ValueError, match=f"not {DIM} and 16"):
        backend.get_builder_cls()(spec, ["layer"], serving.vllm_config(CONFIGS[0]), torch.device("cpu"))


def test_no_common_prefix_is_computed_apart(backend: Any) -> None:
    engine = serving.Engine(backend, CONFIGS[0], requests(CONFIGS[0]), 16)
    assert engine.builder.use_cascade_attention(4096, common="prefix") is False


def child(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_flash_attn_and_its_plugin_import_no_vllm() -> None:
    code = "import sys, flash_attn, flash_attn.serving.vllm\nprint([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    assert child(code) == "[]"


@pytest.fixture
def other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda _: "0.33.1")


@pytest.mark.usefixtures("other_version")
def test_another_vllm_is_refused_in_a_line_where_the_backend_is_chosen() -> None:
    plugin.register()  # refuses nothing: other backends of that vLLM stay of use
    with pytest.raises(plugin.UnfitVersionError) as refusal:
        plugin.check_version()
    assert str(refusal.value) == (
        "flash_attn's attention backend fits vLLM 0.26, and this is vLLM 0.33.1: "
        "pip install 'vllm==0.26.*', or choose another attention backend."
    )
    assert not isinstance(refusal.value, ImportError)


def test_the_refusal_is_the_engine_s() -> None:
    """Not vLLM's own words for a backend that it cannot import."""
    code = (
        "from flash_attn.serving import vllm as plugin\n"
        "plugin.version = lambda _: '0.33.1'\n"
        "plugin.register()\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "try:\n    AttentionBackendEnum.CUSTOM.get_class()\n"
        "except plugin.UnfitVersionError as refusal:\n    print(refusal)\n"
    )
    assert child(code).startswith("flash_attn's attention backend fits vLLM 0.26")


def prove(output: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    script = Path(serving.__file__).with_name("prove_vllm.py")
    command = [sys.executable, str(script), "--cpu", "--output", str(output), *options]
    environment = {**os.environ, "FA2_SPLIT_SIZE": "128"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    return done, json.loads(output.read_text(encoding="utf-8"))


def test_an_engine_gives_the_same_answers_however_it_cuts_its_work(tmp_path: Path) -> None:
    """Its scheduler, caches and sampler: alone, among strangers, in chunks, with cached prefixes, drafts, preempted."""
    done, rows = prove(tmp_path / "rows.json")
    assert done.returncode == 0, done.stdout + done.stderr
    counted = {row["way"]: row["counters"] for row in rows}
    assert counted["prefix caching"]["cached"] > 0
    assert counted["drafts"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert counted["preemption"]["preempted"] > 0


@pytest.mark.parametrize(("way", "counter"), prove_vllm.SHOWN_BY.items())
def test_an_engine_that_did_not_do_it_shows_nothing(way: str, counter: str) -> None:
    assert counter in prove_vllm.shows_nothing(way, {counter: 0})
    assert not prove_vllm.shows_nothing(way, {counter: 1})


def test_without_the_mode_an_engine_s_answers_differ(tmp_path: Path) -> None:
    """The negative control."""
    _, rows = prove(tmp_path / "rows.json", "--control", "--way", "plain")
    assert any(rows[0]["differences"].values())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("model")
    serving_engine.write_model(folder, "llama")
    run_vllm_tests.write_tokenizer(folder, serving_engine.VOCABULARY)
    return AutoTokenizer.from_pretrained(folder)


@given(
    st.lists(st.integers(3, serving_engine.VOCABULARY - 1), max_size=40), st.text(" .,'?!naTe\n", max_size=20)
)
def test_a_text_made_of_tokens_has_those_tokens(tokenizer: Any, tokens: list[int], prompt: str) -> None:
    """As vLLM's own tests need it: they ask for a prompt and what followed it once more."""
    assert len(tokenizer) == serving_engine.VOCABULARY
    assert tokenizer.encode(prompt + tokenizer.decode(tokens)) == [*tokenizer.encode(prompt), *tokens]


@pytest.mark.parametrize(
    ("body", "passed"),
    [
        ("assert backend == 'CUSTOM'", True),
        ("pytest.skip('no')", False),
    ],
)
def test_vllm_s_own_tests_get_the_backend_and_must_pass(tmp_path: Path, body: str, passed: bool) -> None:
    name = run_vllm_tests.TESTS[1]
    test = (
        "import pytest\nfrom vllm.config import VllmConfig\n"
        "@pytest.mark.parametrize('backend', ['FLASH_ATTN', 'TRITON_ATTN'])\n"
        "@pytest.mark.parametrize(('block_m', 'block_n'), [(16, 16), (8, 16)])\n"
        f"def {name}(backend, block_m, block_n):\n    {body}\n"
        f"def {run_vllm_tests.TESTS[0]}():\n    raise AssertionError\n"
    )
    (tmp_path / run_vllm_tests.FILE).write_text(test, encoding="utf-8")
    row = run_vllm_tests.run(tmp_path / run_vllm_tests.FILE, name, "model", "CUSTOM", limit=120)
    assert row["passed"] == passed, row
    assert ("output" in row) != passed

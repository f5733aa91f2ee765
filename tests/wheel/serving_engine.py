"""Models with random weights, and vLLM's engine in this process, for the scripts beside.

Each engine has a process of its own (``in_child``), because vLLM reads its environment once and keeps a GPU's memory.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 4096
MODELS = ("llama", "gpt-oss")
# Of small models on emulated kernels (serving_on_cpu.py).
CPU_MODEL = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "max_position_embeddings": 2048,
}  # fmt: skip
CPU_ENGINE = {
    "dtype": "float16", "enforce_eager": True, "compilation_config": {"mode": 0, "custom_ops": ["none"]},
    "kv_cache_memory_bytes": 1 << 23, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256,
    "block_size": 16,
}  # fmt: skip
seen = {"cached": 0, "preempted": 0}  # tokens that were found in the cache, and requests sent back
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def model_config(kind: str, **other: Any) -> dict[str, Any]:
    """config.json of a small ``llama``, or of a small ``gpt-oss`` with sinks, windows and experts."""
    if kind == "llama":
        own = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
            "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 1 << 18, "rope_theta": 500000.0,
        }  # fmt: skip
    else:
        rope = {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": False,
        }  # fmt: skip
        own = {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 1024,
            "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1 << 17, "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_local_experts": 4,
            "num_experts_per_tok": 2, "experts_per_token": 2, "attention_bias": True, "swiglu_limit": 7.0,
            "rope_parameters": rope, "rope_scaling": rope, "rope_theta": 150000.0, "initial_context_length": 4096,
        }  # fmt: skip
    return {**_COMMON, **own, **other}


def write_model(folder: Path, kind: str, **other: Any) -> str:
    """A folder that vLLM takes for a model; its weights are made in the engine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(kind, **other), indent=2), encoding="utf-8")
    return str(folder)


def drawn(name: str, like: Any) -> Any:
    """A weight of this name, float32: the same in every engine. Scores and logits spread as those of a trained model do."""
    import torch

    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    weight = torch.randn(like.shape, generator=generator, dtype=torch.float32)
    if "norm" in name:
        return 1 + 0.1 * weight
    if "bias" in name:
        return 0.1 * weight
    if like.dim() > 1 and "embed_tokens" not in name:  # and not sinks
        # The scores of random queries and keys of unit variance have a variance of one: sharpened here.
        sharpened = any(part in name for part in ("qkv", "q_proj", "k_proj"))
        gain = 2.0 if sharpened else 3.0 if "lm_head" in name else 1.0
        weight *= gain / math.sqrt(like.shape[-1])
    return weight


def randomize(model: Any) -> int:
    """Fill a model's weights. Returns: how many were filled."""
    import torch

    count = 0
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.is_floating_point():
            continue
        with torch.no_grad():
            parameter.copy_(drawn(name, parameter).to(parameter))
        count += 1
    return count


def write_weights(folder: Path) -> str:
    """A folder with a small Llama and its random weights, for an engine that reads them itself."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    write_model(folder, "llama")
    with torch.device("meta"):
        shapes = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).state_dict()
    weights = {name: drawn(name, like).to(torch.bfloat16) for name, like in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def engine(model: str, backend: str, fill: bool = True, **options: Any) -> Any:
    """VLLM's LLM; its weights are next to zero, or filled."""
    from vllm import LLM

    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "seed": 0,
        "gpu_memory_utilization": 0.8, "max_model_len": 8192, "max_num_seqs": 64, "enable_prefix_caching": False,
        "max_logprobs": 20, "disable_log_stats": False,
    }  # fmt: skip
    _count_preemptions()
    started = LLM(model, attention_backend=backend, **{**defaults, **options})
    if fill:
        started.apply_model(randomize)
    return started


def found_by_vllm() -> bool:
    """Whether the wheel's entry point is there."""
    from importlib.metadata import entry_points

    return "flash_attn_deterministic" in entry_points(group="vllm.general_plugins").names


def environment(invariant: bool, v2: bool | None) -> dict[str, str]:
    """Of a process with an engine: no network, no other process, vLLM's invariant mode or not.

    v2: vLLM's second model runner, its first, or the one that it takes by itself.
    """
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_BATCH_INVARIANT": str(int(invariant)),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # apply_model takes a function
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if v2 is not None:
        own["VLLM_USE_V2_MODEL_RUNNER"] = str(int(v2))
    return own


def in_child(
    script: str, job: dict[str, Any], *, invariant: bool, v2: bool | None = None, limit: float = 420
) -> Any:
    """The result of ``script --child``, which gets the job; or {"error": …}, with the end of what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        asked = json.dumps({**job, "result": str(result)})
        began = time.monotonic()
        with log.open("wb") as output:
            try:
                status = subprocess.run(
                    [sys.executable, script, "--child", asked],
                    env={**os.environ, **environment(invariant, v2)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = -1
        took = round(time.monotonic() - began, 1)
        if status == 0 and result.is_file():
            return {**json.loads(result.read_text(encoding="utf-8")), "seconds": took}
        words = log.read_text(encoding="utf-8", errors="replace")[-6000:]
        return {"error": words, "status": status, "seconds": took}


def serve_child(argument: str, work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's half of ``in_child``."""
    job = json.loads(argument)
    try:
        result = work(job)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # not waiting for what vLLM leaves running


def counters(llm: Any) -> dict[str, float]:
    """How many drafts were made and taken, tokens found in the cache, and requests sent back.

    vLLM counts those of drafts. Its counters of the others lack what fell in a step that gave no token.
    """
    drafts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value") and "spec_decode" in m.name}
    return drafts | seen


@functools.cache  # once a process, however many engines it starts
def _count_preemptions() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    send_back = Scheduler._preempt_request

    def counted(scheduler: Any, *arguments: Any, **named: Any) -> Any:
        seen["preempted"] += 1
        return send_back(scheduler, *arguments, **named)

    Scheduler._preempt_request = counted


def machine() -> dict[str, Any]:
    """What a result says of where it was made."""
    from importlib.metadata import PackageNotFoundError, version

    import flash_attn
    import torch

    found = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none"}
    for name in ("vllm", "torch", "triton", "transformers", "flash_attn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    found["plugin"] = "entry point" if found_by_vllm() else "registered by hand"
    found["series"] = flash_attn.fork_info().get("series", {}).get("commit", "")
    return found

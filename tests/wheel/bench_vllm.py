"""Measure tokens per second of decode in vLLM: flash_attn's backend beside vLLM's own, free and invariant.

    python bench_vllm.py --output bench_vllm.json

Needs a GPU, vLLM and the wheel; no network. Keys and values of the context are made up by vLLM's
DecodeBenchConnector, each sequence's own, so no prompt is computed. Each engine has a process; the median of
several rounds counts. A cell whose keys do not fit the GPU is left out, and says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import serving_engine

# Attention's shapes are those of Llama 3 8B; two layers, so that 64 sequences of 128 k fit a GPU.
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
ENGINES = {
    "flash_attn": ("CUSTOM", False),
    "vLLM free": ("FLASH_ATTN", False),
    "flash_attn, all invariant": ("CUSTOM", True),
    "vLLM invariant": ("FLASH_ATTN", True),
}
CONTEXTS, SEQUENCES = (4096, 32768, 131072), (1, 8, 64)
WARM, STEPS = 12, 48


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One engine's cells."""
    options = {
        "max_model_len": max(job["contexts"]) + WARM + STEPS + 64,
        "max_num_seqs": max(job["sequences"]),
        "gpu_memory_utilization": job["memory"],
        "max_num_batched_tokens": 8192,
    }
    if job["cpu"]:
        import serving_on_cpu

        serving_on_cpu.install()
        options = serving_engine.CPU_ENGINE
    made_up = {"fill_mean": 0.0, "fill_std": 0.5}
    options["kv_transfer_config"] = {
        "kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", "kv_connector_extra_config": made_up,
    }  # fmt: skip
    llm = serving_engine.engine(job["model"], job["backend"], fill=False, **options)
    config = llm.llm_engine.vllm_config.cache_config
    room = (config.num_gpu_blocks or 0) * config.block_size
    cells = []
    for context in job["contexts"]:
        for sequences in job["sequences"]:
            cell: dict[str, Any] = {"context": context, "sequences": sequences}
            if sequences * (context + WARM + STEPS + 16) > room:
                cell["left_out"] = f"{room} tokens fit the GPU"
            else:
                rounds = [decode(llm, context, sequences) for _ in range(job["rounds"])]
                cell["ms"] = [1000 * t for t in rounds]
                cell["tokens_per_second"] = sequences / statistics.median(rounds)
            cells.append(cell)
            print(cell, flush=True)
    return {"cells": cells, "machine": serving_engine.machine(), "room": room}


_asked = 0  # requests so far


def decode(llm: Any, context: int, sequences: int) -> float:
    """Seconds in which each sequence gets a token."""
    from vllm import SamplingParams

    global _asked  # noqa: PLW0603 - names of requests
    engine = llm.llm_engine
    how = SamplingParams(temperature=0.0, max_tokens=WARM + STEPS + 8, ignore_eos=True, detokenize=False)
    names = []
    for _ in range(sequences):
        _asked += 1
        names.append(f"bench-{_asked}")
        # Each its own first token, whatever caches look at.
        engine.add_request(names[-1], {"prompt_token_ids": [3 + _asked % 60] + [7] * (context - 1)}, how)
    have: dict[str, int] = {}

    def step() -> None:
        have.update({output.request_id: len(output.outputs[0].token_ids) for output in engine.step()})

    while len(have) < sequences or min(have.values()) < WARM:
        step()
    before, began = sum(have.values()), time.perf_counter()
    while sum(have.values()) < before + STEPS * sequences:
        step()
    took, made = time.perf_counter() - began, sum(have.values()) - before
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return took * sequences / made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("bench_vllm.json"))
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--context", action="append", type=int)
    parser.add_argument("--sequences", action="append", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.95, help="share of the GPU's that vLLM takes")
    parser.add_argument("--cpu", action="store_true", help="to try this script: small, on emulated kernels")
    options = parser.parse_args()
    if options.child:
        serving_engine.serve_child(options.child, child)
    contexts, sequences = options.context or CONTEXTS, options.sequences or SEQUENCES
    shape = serving_engine.CPU_MODEL if options.cpu else SHAPE
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = serving_engine.write_model(Path(folder, "llama"), "llama", **shape)
        for name in options.engine or ENGINES:
            backend, invariant = ENGINES[name]
            job = {"model": model, "backend": backend, "contexts": contexts, "sequences": sequences,
                   "rounds": options.rounds, "memory": options.memory, "cpu": options.cpu}  # fmt: skip
            results[name] = serving_engine.in_child(__file__, job, invariant=invariant, limit=560)
            if "error" in results[name]:
                print(f"{name} failed:\n{results[name]['error'][-3000:]}", flush=True)
            options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")
    names = [name for name in results if "cells" in results[name]]
    print(f"{'context':>8} {'sequences':>9} " + " ".join(f"{name:>26}" for name in names))
    for n, (context, count) in enumerate((c, s) for c in contexts for s in sequences):
        rates = [results[name]["cells"][n].get("tokens_per_second") for name in names]
        print(
            f"{context:8} {count:9} "
            + " ".join(f"{rate:26.1f}" if rate else f"{'left out':>26}" for rate in rates)
        )
    return 0 if len(names) == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())

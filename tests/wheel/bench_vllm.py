"""Measure decode in vLLM: flash_attn's backend beside vLLM's own, free and invariant.

    python bench_vllm.py --output bench_vllm.json

Needs a GPU, vLLM and the wheel; no network. Keys and values of the context are made up by vLLM's
DecodeBenchConnector, each sequence's own, so no prompt is computed. Each engine has a process. Tokens per second are
the median of several rounds. Two layers leave most of a step to the host, whose time varies by more than backends
differ; so what the GPU is busy in a step is told as well, of attention and in all. A cell whose keys do not fit the
GPU is left out, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
WARM, STEPS, PROFILED = 12, 48, 10
ATTENTION = ("flash_fwd", "fork_", "FlashAttnFwd", "prepare_varlen")  # in the names of its kernels


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
                cell |= {} if job["cpu"] else busy(llm, context, sequences)
            cells.append(cell)
            print(cell, flush=True)
    return {"cells": cells, "machine": serving_engine.machine(), "room": room}


_asked = 0  # requests so far


@contextlib.contextmanager
def decoding(llm: Any, context: int, sequences: int) -> Iterator[Callable[[], int]]:
    """Sequences past their first tokens; each call is a step, and tells how many tokens there are."""
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

    def step() -> int:
        have.update({output.request_id: len(output.outputs[0].token_ids) for output in engine.step()})
        return sum(have.values())

    while len(have) < sequences or min(have.values()) < WARM:
        step()
    yield step
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()


def decode(llm: Any, context: int, sequences: int) -> float:
    """Seconds in which each sequence gets a token."""
    with decoding(llm, context, sequences) as step:
        before, began = step(), time.perf_counter()
        while (made := step()) < before + STEPS * sequences:
            pass
        return (time.perf_counter() - began) * sequences / (made - before)


def busy(llm: Any, context: int, sequences: int) -> dict[str, float]:
    """Milliseconds of a step in which the GPU works: in kernels of attention, and in all."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with decoding(llm, context, sequences) as step:
        step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(PROFILED):
                step()
            torch.cuda.synchronize()
    took = {"attention_ms": 0.0, "gpu_ms": 0.0}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            took["gpu_ms"] += event.device_time_total / PROFILED / 1000
            if any(word in event.name for word in ATTENTION):
                took["attention_ms"] += event.device_time_total / PROFILED / 1000
    return took


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
    for title, figure in (
        ("tokens per second", "tokens_per_second"),
        ("milliseconds of a step that the GPU is busy", "gpu_ms"),
        ("milliseconds of a step in attention's kernels", "attention_ms"),
    ):
        print(f"{title}\n{'context':>8} {'sequences':>9} " + " ".join(f"{name:>26}" for name in names))
        for n, (context, count) in enumerate((c, s) for c in contexts for s in sequences):
            found = [results[name]["cells"][n].get(figure) for name in names]
            told = (f"{value:26.3f}" if value else f"{'-':>26}" for value in found)
            print(f"{context:8} {count:9} " + " ".join(told))
    return 0 if len(names) == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())

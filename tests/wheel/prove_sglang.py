"""Show that a prompt's log-probabilities in SGLang do not depend on what it is served beside, nor on how it is cut.

    python prove_sglang.py --output prove_sglang.json

Needs a GPU, SGLang 0.5.16, the wheel, and nvcc, g++ and ninja for what SGLang compiles as it runs; no network. Each
engine takes a minute or so. Status 0: all are equal, and prefixes were found in the cache. The negative control is
``--control``, the backend with its mode off.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import serving_engine
from prove_vllm import GPU, Answer, batches, differences, prompts

NAME = "flash_attn_deterministic"
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "grammar_backend": "none", "dtype": "bfloat16", "random_seed": 0,
    "attention_backend": NAME, "enable_deterministic_inference": True, "sampling_backend": "pytorch",
    "context_length": 8192, "chunked_prefill_size": 8192, "max_running_requests": 32, "max_total_tokens": 1 << 17,
    "mem_fraction_static": 0.6, "cuda_graph_max_bs_decode": 32, "disable_prefill_cuda_graph": True,
    "log_level": "warning",
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"disable_cuda_graph": True},
    "chunks of 256": {"chunked_prefill_size": 256},
    "pages of 64": {"page_size": 64},
    "prefill graphs": {"disable_prefill_cuda_graph": False, "cuda_graph_max_bs_prefill": 512},
}


def scheduler_without_mode(*arguments: Any, **named: Any) -> Any:
    """SGLang's process that runs the model, with the backend's deterministic mode off."""
    from flash_attn.serving.sglang_backend import Backend
    from sglang.srt.managers.scheduler import run_scheduler_process

    init = Backend.__init__

    def without(self: Any, runner: Any, **options: Any) -> None:
        init(self, runner, **options)
        self.scope = (False, 0)

    Backend.__init__ = without
    return run_scheduler_process(*arguments, **named)


def asked(engine: Any, batch: list[list[int]], tokens: int = GPU.tokens) -> list[tuple[Answer, int]]:
    """The answer to each prompt, all asked at once, and how many of its tokens SGLang found in its cache."""
    how = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    found = []
    for output in engine.generate(
        input_ids=batch, sampling_params=how, return_logprob=True, top_logprobs_num=20
    ):
        meta, ids = output["meta_info"], list(output["output_ids"])
        chosen = [[token, p] for p, token, _ in meta["output_token_logprobs"]]
        likely = [sorted([token, p] for p, token, _ in step) for step in meta["output_top_logprobs"]]
        if (
            [token for token, _ in chosen] != ids
            or {len(step) for step in likely} != {20}
            or len(ids) != tokens
        ):
            raise RuntimeError(f"not an answer of {tokens} tokens: {output}")
        found.append(
            ([ids, [[one, *top] for one, top in zip(chosen, likely, strict=True)]], meta["cached_tokens"])
        )
    return found


def forget(engine: Any) -> None:
    """Empty the cache of prefixes; SGLang refuses while it puts a request away."""
    until = time.monotonic() + 600  # which only a hang takes
    while not engine.flush_cache().success:
        if time.monotonic() > until:
            raise RuntimeError("SGLang does not empty its cache")
        time.sleep(0.1)


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One engine: its prompts alone, among strangers, with their prefix in the cache, and with all in the cache."""
    import sglang
    from sglang.srt.entrypoints.engine import Engine  # sglang.Engine has its own metaclass

    options, kind = {**OPTIONS, **WAYS[job["way"]], "model_path": job["model"]}, Engine
    if job["control"]:
        kind = type("Engine", (kind,), {"run_scheduler_process_func": staticmethod(scheduler_without_mode)})
    watched, strangers = prompts(GPU, "llama")
    rounds: dict[str, list[tuple[Answer, int]]] = {"alone": []}
    with kind(**options) as engine:
        for one in watched:
            forget(engine)
            rounds["alone"] += asked(engine, [one])
        for name, batch in batches("", 0, watched, strangers):
            forget(engine)
            answers, places = asked(engine, [one for _, one in batch]), [n for n, _ in batch]
            rounds[name] = [answers[places.index(n)] for n in range(len(watched))]
        forget(engine)
        asked(engine, [strangers[-1]], 1)  # which begins as two of the prompts
        rounds |= {name: asked(engine, watched) for name in ("prefix cached", "all cached")}
        page, prefix, settings = engine.server_args.page_size, GPU.prefix, str(engine.server_args)
    cached = {name: [count for _, count in found] for name, found in rounds.items()}
    least = {
        "prefix cached": [
            prefix // page * page * (one[:prefix] == strangers[-1][:prefix]) for one in watched
        ],
        "all cached": [(len(one) - 1) // page * page for one in watched],
    }
    missed = [name for name in least if any(a < b for a, b in zip(cached[name], least[name], strict=True))]
    results = {name: [answer for answer, _ in found] for name, found in rounds.items()}
    machine = serving_engine.machine() | {"sglang": sglang.__version__, "settings": settings}
    return {
        "results": results,
        "cached": cached,
        "machine": machine,
        "missed": missed + ["alone"] * any(cached["alone"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("prove_sglang.json"))
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--control", action="store_true", help="the mode off: answers should differ")
    options = parser.parse_args()
    if options.child:
        serving_engine.serve_child(options.child, child)
    os.environ.update(SGLANG_PLUGINS=NAME, SGLANG_IS_FLASHINFER_AVAILABLE="false")
    failed, rows, expected = False, [], None
    with tempfile.TemporaryDirectory() as folder:
        # SGLang's own dummies are so small that attention adds nothing.
        model = serving_engine.write_weights(Path(folder, "llama"))
        for way in options.way or WAYS:
            job = {"model": model, "way": way, "control": options.control}
            made, found = serving_engine.in_child(__file__, job, invariant=False), {}
            for name, answers in made.pop("results", {}).items():
                expected = expected or answers  # of the first way, alone
                found[name] = differences(answers, expected)
            rows.append({**job, **made, "differences": found})
            missed = "".join(f" (shows nothing: cache of {name})" for name in made.get("missed", ()))
            failed |= "error" in made or any(found.values()) or bool(missed)
            told = "; ".join(f"{name}: {', '.join(d) or 'same'}" for name, d in found.items())
            print(f"{way:15} {made['seconds']:6.1f} s  {told or 'failed'}{missed}", flush=True)
            print(made.get("error", "")[-5000:], end="", flush=True)
            options.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Show that a prompt's log-probabilities in vLLM do not depend on what it is served beside, nor on how it is cut.

    python prove_vllm.py --output prove_vllm.json

Needs a GPU, vLLM and the wheel; no network. Each engine takes about a minute, the first of a model longer.
Status 0: all are equal. Negative controls: ``--control``, the backend with the mode off; and ``--backend FLASH_ATTN
--free``, vLLM's own without its invariant mode. ``--cpu`` runs small models on emulated kernels (tests/emulator), in vLLM's own scheduler.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import serving_engine

Answer = list[Any]  # the tokens of a prompt; and of each step the likeliest, with their log-probabilities

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}


@dataclass(frozen=True)
class Scale:
    """How much is asked, and of which engines."""

    tokens: int  # that each prompt is answered with
    prefix: int  # tokens that some prompts share: no multiple of a page
    tails: tuple[int, int]
    phrase: int  # how often one prompt repeats its words, so that drafts from them are right now and then
    strangers: tuple[int, ...]  # lengths
    fillers: dict[
        str, int
    ]  # of 12 tokens, by model: they and the others fill a cache of so many pages, and grow
    pages: dict[str, int]
    vocabulary: dict[str, int]  # words, by model
    ways: dict[str, dict[str, Any]]  # by name, options of an engine
    engine: dict[str, Any] = field(default_factory=dict)  # of all
    model: dict[str, Any] = field(default_factory=dict)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "prefix caching": {"enable_prefix_caching": True},
    "chunks of 256": {"max_num_batched_tokens": 256, "max_num_seqs": 32},
    "chunks of 80": {"max_num_batched_tokens": 80, "max_num_seqs": 32},
    "pages of 64": {"block_size": 64},
    "drafts": {"speculative_config": DRAFTS},
    "preemption": {"max_model_len": 4608},  # with a cache of Scale.pages
}
# What an engine must have done, or its equal bits show nothing: a counter of serving_engine's.
SHOWN_BY = {
    "prefix caching": "cached",
    "preemption": "preempted",
    "drafts": "vllm:spec_decode_num_accepted_tokens",
}
GPU = Scale(
    tokens=48,
    prefix=1537,
    tails=(500, 3000),
    phrase=40,
    strangers=(1, 9, 10, 70, 300, 1100, 2500) * 3,
    # A prompt of gpt-oss takes pages of both kinds of layers until it is computed, and gives back those behind
    # windows: more than a few fillers take by growing.
    fillers={"llama": 8, "gpt-oss": 60},
    pages={"llama": 445, "gpt-oss": 870},
    # Of few words random weights repeat one now and then, as drafts do.
    vocabulary={"llama": serving_engine.VOCABULARY, "gpt-oss": 64},
    ways=WAYS,
)
CPU = Scale(
    tokens=6,
    prefix=137,
    tails=(50, 150),
    phrase=8,
    strangers=(1, 9, 10, 150),
    fillers={"llama": 4},
    pages={"llama": 41},
    vocabulary={"llama": 64},
    ways={
        **{name: WAYS[name] for name in ("plain", "prefix caching", "pages of 64", "drafts")},
        "chunks of 60": {"max_num_batched_tokens": 60},
        "preemption": {},
    },
    engine=serving_engine.CPU_ENGINE,
    model=serving_engine.CPU_MODEL,
)


def prompts(scale: Scale, kind: str) -> tuple[list[list[int]], list[list[int]]]:
    """Those that are looked at, and strangers."""
    draw, words = random.Random(11), scale.vocabulary[kind]

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, words) for _ in range(count)]

    prefix, phrase = tokens(scale.prefix), tokens(9)
    watched = [
        prefix + tokens(scale.tails[0]),
        tokens(9),
        phrase * scale.phrase,
        prefix + tokens(scale.tails[1]),
    ]
    return watched, [*map(tokens, scale.strangers), prefix + tokens(40)]


def asked(llm: Any, batch: list[list[int]], tokens: int) -> list[Answer]:
    """The answer to each prompt, all asked at once."""
    from vllm import SamplingParams

    how = SamplingParams(
        temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=20, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": one} for one in batch], how, use_tqdm=False)
    found = []
    for output in outputs:
        serving_engine.seen["cached"] += output.num_cached_tokens or 0
        step = output.outputs[0]
        likely = [sorted([int(token), p.logprob] for token, p in one.items()) for one in step.logprobs]
        found.append([list(step.token_ids), likely])
    return found


def batches(
    way: str, fillers: int, watched: list[list[int]], strangers: list[list[int]]
) -> Iterator[tuple[str, list[tuple[int, list[int]]]]]:
    """Prompts that are asked at once, with the number of those that are looked at; -1 of others."""
    if way == "preemption":  # vLLM sends back those that came last
        yield (
            "short of pages",
            [*((-1, list(range(3, 15))) for _ in range(fillers)), *enumerate(watched)],
        )
        return
    for name, seed in (("among strangers", 1), ("in another order", 2)):
        batch = [*enumerate(watched), *((-1, one) for one in strangers)]
        random.Random(seed).shuffle(batch)
        yield name, batch


class NoScope:
    """In place of the scope that the backend opens for a call: the mode stays off."""

    def get(self) -> None:
        return None

    def set(self, _: Any) -> None:
        return None

    def reset(self, _: Any) -> None:
        return None


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One engine: its prompts alone, then among strangers."""
    scale = CPU if job["cpu"] else GPU
    if job["cpu"]:
        import serving_on_cpu

        serving_on_cpu.install()
    if job["control"]:
        import flash_attn_2_cuda

        flash_attn_2_cuda.deterministic_scope = NoScope()
    options = {**scale.engine, **scale.ways[job["way"]]}
    if job["way"] == "preemption":
        options["num_gpu_blocks_override"] = scale.pages[job["kind"]]
    watched, strangers = prompts(scale, job["kind"])
    llm = serving_engine.engine(job["model"], job["backend"], **options)
    results = {"alone": [asked(llm, [one], scale.tokens)[0] for one in watched]}
    if options.get("enable_prefix_caching"):
        results["alone again"] = [asked(llm, [one], scale.tokens)[0] for one in watched]
    for name, batch in batches(job["way"], scale.fillers[job["kind"]], watched, strangers):
        answers = asked(llm, [one for _, one in batch], scale.tokens)
        places = [n for n, _ in batch]
        results[name] = [answers[places.index(n)] for n in range(len(watched))]
    return {"results": results, "machine": serving_engine.machine(), "counters": serving_engine.counters(llm)}


def differences(got: list[Answer], expected: list[Answer]) -> list[str]:
    """What of each prompt is not the same: a token, or log-probabilities and by how much."""
    found = []
    for n, ((tokens, steps), (other_tokens, other_steps)) in enumerate(zip(got, expected, strict=True)):
        if [tokens, steps] == [other_tokens, other_steps]:
            continue
        if tokens != other_tokens:
            first = next(i for i, (a, b) in enumerate(zip(tokens, other_tokens, strict=True)) if a != b)
            found.append(f"prompt {n}: another token at {first}")
            continue
        pairs = list(zip(steps, other_steps, strict=True))
        apart = max(abs(dict(a).get(token, p) - p) for a, b in pairs for token, p in b)
        found.append(f"prompt {n}: {sum(a != b for a, b in pairs)} of {len(pairs)} steps, by {apart:.3g}")
    return found


def shows_nothing(way: str, counters: dict[str, float]) -> str:
    """Why an engine's equal bits would show nothing; empty where they do."""
    counter = SHOWN_BY.get(way)
    return f" (shows nothing: {counter} is 0)" if counter and not counters.get(counter) else ""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("prove_vllm.json"))
    parser.add_argument("--model", action="append", choices=serving_engine.MODELS)
    parser.add_argument("--way", action="append", choices=sorted({*GPU.ways, *CPU.ways}))
    parser.add_argument("--backend", default="CUSTOM")
    parser.add_argument("--free", action="store_true", help="without vLLM's invariant mode")
    parser.add_argument(
        "--runner", type=int, choices=(1, 2), default=1, help="vLLM's model runner; 2 makes no drafts"
    )
    parser.add_argument(
        "--control", action="store_true", help="without the deterministic mode: answers should differ"
    )
    parser.add_argument("--cpu", action="store_true", help="on emulated kernels")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.child:
        serving_engine.serve_child(options.child, child)
    scale, failed, rows = CPU if options.cpu else GPU, False, []
    ways = [way for way in scale.ways if way in (options.way or scale.ways)]
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.model or scale.pages:
            expected = None
            shape = {**scale.model, "vocab_size": scale.vocabulary[kind]}
            model = serving_engine.write_model(Path(folder, kind), kind, **shape)
            for way in ways:
                if way == "drafts" and options.runner == 2:
                    continue
                job = {"model": model, "kind": kind, "backend": options.backend, "way": way}
                job |= {"cpu": options.cpu, "control": options.control}
                invariant = not (options.free or options.cpu)
                made = serving_engine.in_child(__file__, job, invariant=invariant, v2=options.runner == 2)
                found = {}
                for name, answers in made.pop("results", {}).items():
                    expected = expected or answers
                    found[name] = differences(answers, expected)
                rows.append(
                    {**job, "invariant": invariant, "runner": options.runner, **made, "differences": found}
                )
                empty = "" if "error" in made else shows_nothing(way, made["counters"])
                failed |= "error" in made or any(found.values()) or bool(empty)
                told = "; ".join(f"{name}: {', '.join(d) or 'same'}" for name, d in found.items())
                print(f"{kind:8} {way:15} {made['seconds']:6.1f} s  {told or 'failed'}{empty}", flush=True)
                print(made.get("error", "")[-3000:], end="", flush=True)
                options.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Run vLLM's own tests of batch invariance on flash_attn's backend.

    python run_vllm_tests.py --tests vllm-0.26.0/tests/v1/determinism --output run_vllm_tests.json

The tests are in vLLM's sdist (``pip download --no-deps --no-binary :all: vllm==0.26.0``). They name vLLM's backends, and
ask Hugging Face for a model; here they get this backend, and a small Llama of random weights whose tokens are single
characters. Nothing else of them is changed. Each has a process and an engine of its own, which takes a minute or so.
Needs a GPU, vLLM, pytest and the wheel; no network. Status 0: all passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import serving_engine

FILE = "test_batch_invariance.py"
# Environment variables: what the tests get, and where it is written how many passed, failed and so on.
BACKEND, COUNTS = "FLASH_ATTN_TESTED", "FLASH_ATTN_COUNTS"
TESTS = (
    "test_simple_generation",
    "test_logprobs_bitwise_batch_invariance_bs1_vs_bsN",
    "test_decode_logprobs_match_prefill_logprobs",
    "test_v1_generation_is_deterministic_across_batch_sizes_with_needle",
    "test_logprobs_without_batch_invariance_should_fail",  # vLLM's control: it passes where bits differ
)


def pytest_configure() -> None:
    """Here begins what the tests' pytest calls, whose plugin this file is.

    vLLM's helpers fail if they are the first to import vLLM; a conftest.py two folders up does so before them.
    """
    import vllm.config  # noqa: F401


def pytest_generate_tests(metafunc: Any) -> None:
    """Whatever backends a test names, it gets the one that is asked for."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        if mark.args[0] == "backend":
            mark.args[1][:] = [os.environ[BACKEND]]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the counts of outcomes for the process that started this pytest."""
    outcomes = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
    found = {name: len(terminalreporter.stats[name]) for name in outcomes if name in terminalreporter.stats}
    Path(os.environ[COUNTS]).write_text(json.dumps(found), encoding="utf-8")


def write_tokenizer(folder: Path, size: int) -> None:
    """Tokens are characters, so that a text made of tokens has those tokens again, whatever they are."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    letters = ["\n", *map(chr, range(0x20, 0x7F))]
    letters += map(chr, range(0x4E00, 0x4E00 + size - len(special) - len(letters)))
    names = {name: n for n, name in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[], unk_token=special[0]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=special[0],
        bos_token=special[1],
        eos_token=special[2],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def run(file: Path, test: str, model: str, backend: str, limit: float) -> dict[str, Any]:
    """One test, in a process of its own."""
    environment = {**os.environ, **serving_engine.environment(invariant=True, v2=None)}
    # The tests set the one, and vLLM's engine has a process of its own as a user's has.
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        del environment[name]
    here = str(Path(__file__).parent)
    # Of flex_attn's block sizes one: another backend has none.
    only = f"{test} and not 8-16"
    command = [sys.executable, "-m", "pytest", str(file), "-c", os.devnull, "-k", only]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts, log = Path(folder, "counts.json"), Path(folder, "log")
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
            "VLLM_TEST_MODEL": model,
            BACKEND: backend,
            COUNTS: str(counts),
        }
        with log.open("wb") as output, subprocess.Popen(
            [*command, "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider"],
            env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        ) as started:  # fmt: skip
            try:
                status = started.wait(limit)
            except subprocess.TimeoutExpired:
                status = -1
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)  # the engine, which would keep the GPU
        words = log.read_text(encoding="utf-8", errors="replace")
        found = json.loads(counts.read_text(encoding="utf-8")) if counts.is_file() else {}
    took = round(time.monotonic() - began, 1)
    passed = status == 0 and found == {"passed": 1}
    return {"test": test, "backend": backend, "counts": found, "seconds": took, "passed": passed} | (
        {} if passed else {"output": words[-20000:]}
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", type=Path, required=True, help="vLLM's folder tests/v1/determinism")
    parser.add_argument("--output", type=Path, default=Path("run_vllm_tests.json"))
    parser.add_argument("--backend", default="CUSTOM", help="one of vLLM's names (default: CUSTOM, ours)")
    parser.add_argument("--test", action="append", choices=TESTS, help="(default: all)")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a test (default: 900)")
    options = parser.parse_args()
    file = options.tests / FILE
    if not file.is_file():
        parser.error(
            f"no {FILE} in {options.tests}; --tests takes the folder tests/v1/determinism of vLLM's sdist"
        )
    if not options.output.absolute().parent.is_dir():
        parser.error(f"no folder {options.output.absolute().parent} for --output; make it")
    if options.backend == "CUSTOM" and not serving_engine.found_by_vllm():
        parser.error("vLLM would not find the backend: install the wheel (pip install dist/flash_attn-….whl)")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = serving_engine.write_weights(Path(folder, "llama"))
        write_tokenizer(Path(model), serving_engine.VOCABULARY)
        for test in options.test or TESTS:
            rows.append(run(file, test, model, options.backend, options.limit))
            row = rows[-1]
            told = "passed" if row["passed"] else f"FAILED: {row['counts']}"
            print(f"{test:70} {row['seconds']:6.1f} s  {told}", flush=True)
            print(row.get("output", "")[-3000:], end="", flush=True)
            options.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Microseconds that a warm call at batch 1 keeps the caller's thread, through the public functions.

    PYTHONPATH=SITE python tests/wheel/bench_host.py --against OTHER_SITE --json host.json

SITE and OTHER_SITE are folders that wheels were installed to. Each wheel has a process of its own, and they measure a
call by turns, some milliseconds each, for the speed of a host changes. One process may be half again as slow as the
next for as long as it lives, so there are several of each, one pair after the other, and each tells what importing took
it. A time is the least of all rounds, and a ratio the median of the rounds'. torch's own functions are rows too: their
ratios should be 1. A GPU is needed: launches are part of the time, and waiting for the GPU is not.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

ROUNDS = 60
BATCHES = 40  # of timing.CALLS calls, in each round: the least counts
PROCESSES = 4  # of each wheel, one after the other
IMPORT = "import of flash_attn, s"


def calls() -> dict[str, Callable[[], Any]]:
    import torch
    from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16)

    new = normal(1, 1, 32, 64)
    cache, longer = ([normal(1, tokens, 8, 64) for _ in range(2)] for tokens in (128, 2048))
    inputs = [normal(1, 64, 8, 64) for _ in range(3)]
    learned = [tensor.clone().requires_grad_() for tensor in inputs]
    packed = [tensor[0] for tensor in inputs]
    length, more = (torch.tensor([tokens], dtype=torch.int32, device="cuda") for tokens in (128, 2048))
    offsets = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    heads_first = [tensor.transpose(1, 2) for tensor in inputs]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(
            new, *cache, cache_seqlens=length, causal=True
        ),
        # With the mode off in several splits, for which a call has scratch and a second kernel
        "flash_attn_with_kvcache, 2048 keys": lambda: flash_attn_with_kvcache(
            new, *longer, cache_seqlens=more, causal=True
        ),
        "flash_attn_func": lambda: flash_attn_func(*inputs, causal=True),
        "flash_attn_func, with gradients": lambda: flash_attn_func(*learned, causal=True),
        "flash_attn_varlen_func": lambda: flash_attn_varlen_func(
            *packed, offsets, offsets, 64, 64, causal=True
        ),
        "two torch.empty": lambda: (torch.empty_like(inputs[0]), torch.empty(8, 64, device="cuda")),
        "PyTorch's SDPA": lambda: sdpa(*heads_first, is_causal=True),
    }


def _answers() -> TextIO:
    """Where the parent reads: what a wheel prints goes with the errors. Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve() -> None:
    """Tell the seconds that importing flash_attn takes beyond torch, and the calls' names; then answer.

    A question is a line with a mode and a name, and its answer the time.
    """
    answers = _answers()
    importlib.import_module("torch")
    began = time.perf_counter()
    flash_attn = importlib.import_module("flash_attn")
    print(json.dumps(time.perf_counter() - began), file=answers, flush=True)
    from timing import CALLS, host_microseconds  # with torch

    every = calls()
    for enabled in (False, True):
        flash_attn.set_deterministic_mode(enabled)
        for call in every.values():
            for _ in range(CALLS):
                call()
    print(json.dumps(list(every)), file=answers, flush=True)
    for line in sys.stdin:
        mode, name = line.rstrip("\n").split(" ", 1)
        flash_attn.set_deterministic_mode(mode == "on")
        print(json.dumps(host_microseconds(every[name], BATCHES)), file=answers, flush=True)


class Site:
    """A process with one wheel."""

    def __init__(self, folder: str | None) -> None:
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        command, env = [sys.executable, __file__, "--serve"], os.environ | {"PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Site:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self._process.terminate()
        self._process.communicate()

    def ask(self, question: str = "") -> Any:
        """What the process answers; without a question, what it tells first."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            if question:
                stdin.write(f"{question}\n")
                stdin.flush()
        line = stdout.readline()
        if not line:
            raise SystemExit(
                f"the process that measures ended with {self._process.wait()}; its error is above"
            )
        return json.loads(line)


def by_turns(sides: Iterable[str], number: int) -> list[str]:
    """Each side begins every other time."""
    return sorted(sides, reverse=number % 2 == 0)


def measured(folders: dict[str, str | None], rounds: int) -> dict[str, dict[str, list[float]]]:
    """By call and mode, and by site, microseconds for each round; and seconds that importing takes."""
    rows: dict[str, dict[str, list[float]]] = {}

    def add(name: str, side: str, value: float) -> None:
        rows.setdefault(name, {of: [] for of in folders})[side].append(value)

    processes = min(PROCESSES, rounds)
    for process in range(processes):
        with contextlib.ExitStack() as stack:
            sites, names = {}, []
            for side in by_turns(folders, process):
                sites[side] = stack.enter_context(Site(folders[side]))
                add(IMPORT, side, sites[side].ask())
                names = sites[side].ask()
            for number in range(process * rounds // processes, (process + 1) * rounds // processes):
                for mode, name in itertools.product(("off", "on"), names):
                    for side in by_turns(folders, number):
                        add(f"{name}, {mode}", side, sites[side].ask(f"{mode} {name}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="SITE", help="the other wheel's folder")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="how often each measures a call (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least one is needed")
    if arguments.against and not Path(arguments.against).is_dir():
        parser.error(
            f"--against {arguments.against}: there is no such folder; name one that pip installed a wheel to"
        )
    folders: dict[str, str | None] = {"this": None}
    if arguments.against:
        folders["other"] = arguments.against
    try:
        rows = measured(folders, arguments.rounds)
    except KeyboardInterrupt:
        raise SystemExit("interrupted; no figure was written") from None
    told: dict[str, dict[str, float]] = {}
    for name, row in rows.items():
        told[name] = {side: min(times) for side, times in row.items()}
        ratio = ""
        if "other" in row:
            pairs = zip(row["this"], row["other"], strict=True)
            told[name]["ratio"] = statistics.median(mine / other for mine, other in pairs)
            ratio = f"  {told[name]['ratio']:.3f} x {told[name]['other']:8.2f}"
        print(f"{name:40} {told[name]['this']:8.2f}{ratio}")
    if arguments.json:
        from timing import write  # with torch

        write(arguments.json, {"format": 2, "rows": told, "rounds": rows})


if __name__ == "__main__":
    main()

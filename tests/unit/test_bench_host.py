"""The measurement of host time, with a torch that computes nothing and wheels that only wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.waiting import PATIENCE, until

BENCH = Path(__file__).resolve().parents[1] / "wheel/bench_host.py"
TORCH = """
import sys, time


class Anything:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__):
        time.passed += 1e-6
        return self

    __getitem__ = __call__


sys.modules[__name__] = Anything()
time.passed = 0.0  # the only clock: how fast the machine is decides nothing
time.perf_counter = lambda: time.passed
"""
WHEEL = """
import time
from pathlib import Path

print("a word of the wheel's")
time.passed += 0.5
FOLDER = Path(__file__).parent
waited = {microseconds}


def _wait(*_, **__):
    time.passed += waited * 1e-6


flash_attn_func = flash_attn_varlen_func = flash_attn_with_kvcache = _wait


def set_deterministic_mode(enabled):
    global waited
    waited = {microseconds} * (3 if enabled else 1)
    with (FOLDER.parent / "asked").open("a") as file:
        file.write(f"{{FOLDER.name}} {{'on' if enabled else 'off'}}\\n")
    {then}
"""
ROUNDS = 6
# A program that a shell without a terminal began in the background ignores Ctrl-C, and what it begins does too.
HEARS_INTERRUPTS = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def site(folder: Path, microseconds: int, then: str = "pass") -> Path:
    folder.mkdir()
    (folder / "torch.py").write_text(TORCH)
    (folder / "flash_attn.py").write_text(WHEEL.format(microseconds=microseconds, then=then))
    return folder


def bench(this: Path, *arguments: str, rounds: int = ROUNDS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCH, "--rounds", str(rounds), *arguments],
        env=os.environ | {"PYTHONPATH": str(this)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_wheels_that_measure_by_turns_are_compared(tmp_path: Path) -> None:
    this, other = site(tmp_path / "this", 20), site(tmp_path / "other", 40)
    done = bench(this, "--against", str(other), "--json", str(tmp_path / "host.json"))
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "host.json").read_text())
    for mode, microseconds in (("off", 20), ("on", 60)):
        row = told["rows"][f"flash_attn_func, {mode}"]
        assert row["this"] == pytest.approx(microseconds)
        assert row["ratio"] == pytest.approx(0.5)
        assert len(told["rounds"][f"flash_attn_func, {mode}"]["other"]) == ROUNDS
    line = next(line for line in done.stdout.splitlines() if line.startswith("flash_attn_func, on"))
    assert f"{told['rows']['flash_attn_func, on']['ratio']:.3f} x" in line

    # Four processes of each, with 1 or 2 rounds. A call at a time, and each side begins every other time.
    assert told["rounds"]["import of flash_attn, s"]["other"] == [0.5] * 4
    asked = (tmp_path / "asked").read_text().splitlines()
    calls = (len(asked) - 4 * 4) // (ROUNDS * 4)
    turns = ["this", "other"], ["other", "this"]
    expected, number = [], 0
    for process, rounds in enumerate((1, 2, 1, 2)):
        expected += [f"{side} {mode}" for side in turns[process % 2] for mode in ("off", "on")]  # first calls
        for _ in range(rounds):
            for mode in ("off", "on"):
                expected += [f"{side} {mode}" for side in turns[number % 2]] * calls
            number += 1
    assert asked == expected


def test_one_wheel_is_measured_alone(tmp_path: Path) -> None:
    done = bench(site(tmp_path / "this", 20))
    assert done.returncode == 0, done.stderr
    assert "import of flash_attn, s" in done.stdout
    assert " x " not in done.stdout
    assert "a word of the wheel's" in done.stderr


@pytest.mark.parametrize("when", ["at once", "after a while"])
def test_a_process_that_fails_ends_the_measurement_with_its_error(tmp_path: Path, when: str) -> None:
    fail = "raise ValueError('no GPU')"
    if when == "after a while":
        fail = f"if (FOLDER.parent / 'asked').read_text().count('on') > 3: {fail}"
    done = bench(site(tmp_path / "this", 20, fail))
    assert done.returncode == 1
    assert "ValueError: no GPU" in done.stderr
    ends = "the process that measures ended with 1; its error is above"
    assert done.stderr.splitlines()[-1] == ends
    assert "BrokenPipe" not in done.stderr


def test_an_interrupt_ends_it_and_its_processes_in_a_line(tmp_path: Path) -> None:
    this = site(tmp_path / "this", 20)
    command = [sys.executable, "-c", HEARS_INTERRUPTS, str(BENCH), "--rounds", "100000"]
    bench = subprocess.Popen(
        [*command, "--json", str(tmp_path / "host.json")],
        env=os.environ | {"PYTHONPATH": str(this)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until((tmp_path / "asked").exists, "a first call", bench)
    os.killpg(bench.pid, signal.SIGINT)  # as a terminal does
    try:
        _, told = bench.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(bench.pid, signal.SIGKILL)
        raise
    assert bench.returncode == 1
    assert told.splitlines()[-1] == "interrupted; no figure was written"
    assert "Traceback" not in told
    assert not (tmp_path / "host.json").exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(bench.pid, 0)


def test_no_round_is_refused(tmp_path: Path) -> None:
    done = bench(site(tmp_path / "this", 20), rounds=0)
    assert done.returncode == 2
    assert "--rounds 0: at least one is needed" in done.stderr


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A wheel would be measured against itself."""
    done = bench(site(tmp_path / "this", 20), "--against", str(tmp_path / "other"))
    assert done.returncode == 2
    assert f"--against {tmp_path / 'other'}: there is no such folder" in done.stderr

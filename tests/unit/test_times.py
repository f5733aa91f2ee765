"""What the rings of tests are said to take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import times
from tests.unit.conftest import ROOT

CASES = """
import time
import pytest
def test_one():
    until = time.monotonic() + 0.01  # more than what the times are rounded to
    while time.monotonic() < until: pass
@pytest.mark.in_turn(1)
def test_turn(): pass
"""


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *words, "-c", os.devnull, "-p", "tests.times", str(folder)]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("side_by_side", [(), ("-p", "xdist", "--numprocesses=2")])
def test_a_run_writes_the_seconds_of_each_test_and_shows_those_of_each_file(
    tmp_path: Path, side_by_side: tuple[str, ...]
) -> None:
    for name in ("one", "other"):
        (tmp_path / f"test_{name}.py").write_text(CASES)
    done = run(*side_by_side, "--times", "out/run.json", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = times.Run.read(tmp_path / "out/run.json")
    assert sorted(told.tests) == [
        f"test_{name}.py::test_{case}" for name in ("one", "other") for case in ("one", "turn")
    ]
    assert 0.01 <= max(told.tests.values()) <= told.seconds + 0.1  # which is rounded to that
    assert told.turns == {f"test_{name}.py::test_turn": [1] for name in ("one", "other")}
    assert "2 tests  test_other.py" in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.json"]


def test_the_longest_files_come_first_and_the_rest_in_one_line() -> None:
    tests = {f"test_{n}.py::test": float(n) for n in range(20)} | {"test_3.py::other": 100.0}
    first, *_, last = times.table([times.Run(1.0, tests, {})])
    assert first.split() == ["103.0", "s", "2", "tests", "test_3.py"]
    assert last.endswith("8 other files")
    assert len(times.by_file([times.Run(1.0, tests, {})])) == 20


@pytest.mark.parametrize(
    ("seconds", "slow", "level"),
    [
        (600, 1.0, ""),
        (661, 1.0, "warning"),
        (899, 1.0, "warning"),
        (901, 1.0, "error"),
        (901, 2.0, ""),
        (1801, 2.0, "error"),
    ],
)
def test_a_ring_that_passes_its_limit_is_told_by_how_slow_the_machine_is(
    seconds: float, slow: float, level: str
) -> None:
    said, found = times.verdict("tests", seconds, slow)
    assert found == level
    assert ("2.0 times as slow" in said) == (slow > 1)


@pytest.mark.parametrize(("seconds", "options", "status"), [(5000, ["--every-turn"], 1), (5000, [], 0)])
def test_too_long_is_an_error_where_every_turn_ran(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    options: list[str],
    status: int,
) -> None:
    monkeypatch.setattr(times, "slowness", lambda: 1.0)
    times.Run(seconds, {"a.py::a": 3.0}, {}).write(tmp_path / "run.json")
    assert times.main(["ci", *options, str(tmp_path / "run.json")]) == status
    assert "error: the ring ci took 5000 s; its limit is 1800" in capsys.readouterr().out


@pytest.mark.parametrize("side_by_side", [1, 2])
def test_a_ring_is_what_runs_each_time_and_the_longest_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], side_by_side: int
) -> None:
    monkeypatch.setattr(times, "slowness", lambda: 1.0)
    tests = {"a.py::each": 1000.0, "a.py::first": 500.0, "a.py::last": 900.0, "a.py::both": 10.0}
    turns = {"a.py::first": [0], "a.py::last": [2], "a.py::both": [0, 2]}
    tests = {name: seconds * side_by_side for name, seconds in tests.items()}
    times.Run(2410.0, tests, turns).write(tmp_path / "run.json")
    assert times.main(["ci", "--every-turn", str(tmp_path / "run.json")]) == 0
    said = capsys.readouterr().out
    assert "Seconds of each turn's own tests: 510, 0, 910." in said
    assert "The ring ci took 1910 s" in said


@pytest.mark.parametrize("content", [None, "{", "{}"], ids=["absent", "cut off", "of something else"])
def test_a_file_that_is_no_run_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(SystemExit) as ended:
        times.main(["ci", str(tmp_path / "run.json")])
    assert ended.value.code == 2
    assert "not what --times wrote" in capsys.readouterr().err


def test_a_run_says_of_which_format_it_is(tmp_path: Path) -> None:
    times.Run(1.0, {}, {}).write(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["format"] == times.FORMAT


def test_this_machine_is_as_slow_as_it_is() -> None:
    assert 1 <= times.slowness() < 1000

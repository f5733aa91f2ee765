"""What each file of tests took, and whether a ring of tests keeps its limit.

As a plugin of pytest it writes the seconds of each test, and prints those of each file::

    python -m pytest -p tests.times --times build/times/unit.json tests/unit

As a program it adds up the runs of one ring, and tells whether it took too long::

    python -m tests.times ci build/times/unit.json build/times/integration.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

FORMAT = 1
# Seconds of wall clock that a ring may take on two cores like those that REFERENCE was seen on, with caches of
# compiles empty, and what is downloaded there. CONTRIBUTING.md tells what is in which.
LIMITS = {"tests": 600, "ci": 1800}
WARNS, FAILS = 1.1, 1.5  # times the limit
REFERENCE = 0.11  # seconds that :func:`slowness` counts for on such a core
_SHOWN = 12  # files, of those that took longest
_TURNS = "in_turn"


@dataclass(frozen=True)
class Run:
    """One run of pytest: seconds of wall clock, of each test, and the turns of those that take turns."""

    seconds: float
    tests: dict[str, float]
    turns: dict[str, list[int]]

    @classmethod
    def read(cls, path: Path) -> Run:
        """A run that the plugin wrote."""
        told = json.loads(path.read_text(encoding="utf-8"))
        return cls(told["seconds"], told["tests"], told["turns"])

    def write(self, path: Path) -> None:
        """Aside, then renamed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        told = {"format": FORMAT, "seconds": self.seconds, "tests": self.tests, "turns": self.turns}
        part.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def by_file(runs: list[Run]) -> dict[str, tuple[float, int]]:
    """Seconds and number of the tests of each file, longest first; of processes side by side each counts."""
    found: dict[str, tuple[float, int]] = {}
    for name, seconds in (each for run in runs for each in run.tests.items()):
        file = name.partition("::")[0]
        before, count = found.get(file, (0.0, 0))
        found[file] = (before + seconds, count + 1)
    return dict(sorted(found.items(), key=lambda each: -each[1][0]))


def share(run: Run) -> float:
    """The seconds of wall clock that a second of a test counts for: tests may run side by side."""
    return min(1.0, run.seconds / max(sum(run.tests.values()), 1e-9))


def by_turn(runs: list[Run]) -> list[float]:
    """Seconds of each turn's own tests, where all turns ran: what several compile counts for the first alone."""
    found: dict[int, float] = defaultdict(float)
    for run in runs:
        for name, turns in run.turns.items():
            for turn in turns:
                found[turn] += run.tests.get(name, 0.0) * share(run)
    return [found[turn] for turn in range(max(found, default=-1) + 1)]


def table(runs: list[Run]) -> list[str]:
    """The files that took longest, and the rest in a line."""
    rows = [(seconds, count, file) for file, (seconds, count) in by_file(runs).items()]
    rest = rows[_SHOWN:]
    if rest:
        rows = [
            *rows[:_SHOWN],
            (sum(r[0] for r in rest), sum(r[1] for r in rest), f"{len(rest)} other files"),
        ]
    return [f"{seconds:8.1f} s  {count:5d} tests  {name}" for seconds, count, name in rows]


def slowness() -> float:
    """How many times as long this machine takes as one that the limits are for; at least 1."""

    def loop() -> float:
        begun = time.perf_counter()
        sum(i * i for i in range(2_000_000))
        return time.perf_counter() - begun

    return max(1.0, min(loop() for _ in range(3)) / REFERENCE)


def verdict(ring: str, seconds: float, slow: float) -> tuple[str, str]:
    """What is said of a ring that took so long on a machine so slow, and ``""``, ``warning`` or ``error``."""
    limit = LIMITS[ring]
    share = seconds / slow / limit
    said = f"the ring {ring} took {seconds:.0f} s; its limit is {limit}"
    if slow > 1.05:
        said += (
            f", and {limit * slow:.0f} on this machine, which is {slow:.1f} times as slow as the limit is for"
        )
    if share > FAILS:
        return f"{said}: more than {FAILS} times that.", "error"
    return f"{said}.", "warning" if share > WARNS else ""


def main(words: list[str]) -> int:
    """Tell what a ring took; 1 where it passes its limit by half, and every turn ran."""
    parser = argparse.ArgumentParser(prog="python -m tests.times", description=__doc__)
    parser.add_argument("ring", choices=LIMITS)
    parser.add_argument("runs", nargs="+", type=Path, metavar="FILE", help="what --times wrote")
    parser.add_argument("--seconds", type=float, help="of the whole ring, where it did more than these runs")
    parser.add_argument(
        "--every-turn", action="store_true", help="the runs took all turns, and too long is an error"
    )
    options = parser.parse_args(words)
    try:
        runs = [Run.read(path) for path in options.runs]
    except (OSError, ValueError, KeyError) as e:
        parser.error(f"not what --times wrote: {e!r}; run the tests with -p tests.times --times FILE")
    print(f"Seconds by file, longest first ({', '.join(map(str, options.runs))} have those of each test):")
    print("\n".join(table(runs)))
    seconds = options.seconds or sum(run.seconds for run in runs)
    if options.every_turn:
        turns = by_turn(runs)
        print("Seconds of each turn's own tests: " + ", ".join(f"{turn:.0f}" for turn in turns) + ".")
        in_turn = sum(run.tests.get(name, 0.0) * share(run) for run in runs for name in run.turns)
        seconds += max(turns, default=0.0) - in_turn  # a ring takes one turn
    said, level = verdict(options.ring, seconds, slowness())
    print(f"{level}: {said}" if level else said[0].upper() + said[1:])
    return int(level == "error" and options.every_turn)


# The plugin ------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--times``."""
    parser.addoption(
        "--times", metavar="FILE", type=Path, help="write the seconds of each test here, as JSON"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let reports have the turns of their tests, also those that another process makes."""
    for item in items:
        if marker := item.get_closest_marker(_TURNS):
            item.user_properties.append((_TURNS, [*marker.args]))


class _Plugin:
    """Collects the seconds of a run's tests, in the process that the others report to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = time.monotonic()
        self.tests: dict[str, float] = defaultdict(float)
        self.turns: dict[str, list[int]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests[report.nodeid] += report.duration
        if turns := dict(report.user_properties).get(_TURNS):
            self.turns[report.nodeid] = turns

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        run = Run(round(time.monotonic() - self.begun, 1), _rounded(self.tests), self.turns)
        run.write(self.path)
        terminalreporter.section("seconds by file")
        for line in table([run]):
            terminalreporter.write_line(line)


def _rounded(tests: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in sorted(tests.items(), key=lambda each: -each[1])}


def pytest_configure(config: pytest.Config) -> None:
    """Collect seconds where ``--times`` asks for it."""
    path = config.getoption("--times")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Plugin(path), "seconds-of-tests")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

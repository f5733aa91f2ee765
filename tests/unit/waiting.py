"""How tests wait: for an event, and never for a time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 600  # seconds, which only a hang takes
WHEN_OPEN = 'while [ -e "$0.shut" ]; do sleep 0.02; done\n'  # a line of a program in both_in_turn


def until(done: Callable[[], T], what: str, process: subprocess.Popen[Any] | None = None) -> T:
    """What ``done`` returns once it is true; what it waits for is the error of a hang.

    A process that must be there meanwhile ends the wait when it ends.
    """
    limit = time.monotonic() + PATIENCE
    while not (found := done()):
        assert process is None or process.poll() is None, f"{what}: the process ended before"
        assert time.monotonic() < limit, f"{what}: not in {PATIENCE} s"
        time.sleep(0.02)
    return found


def a_tick(folder: Path) -> None:
    """Wait until what is written has a time after now: files have the time of the kernel's last tick."""
    now, probe = time.time_ns(), folder / "tick"

    def later() -> bool:
        probe.touch()
        return probe.stat().st_mtime_ns > now

    until(later, "a tick of the kernel")
    probe.unlink()


def both_in_turn(run: Callable[[], T], program: Path, notes: list[str]) -> list[T]:
    """What two threads return, of which the second waits for the first before the first's program may end."""
    shut = Path(f"{program}.shut")
    shut.touch()
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(run) for _ in range(2)]
        try:
            until(lambda: any("waiting for it" in note for note in notes), "the second to wait")
        finally:
            shut.unlink()
        return [one.result(PATIENCE) for one in runs]

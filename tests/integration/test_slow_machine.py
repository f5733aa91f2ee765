"""What waits is green at a tenth of the speed: a process that never waits has nine tenths of each core."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.turns import parts
from tests.integration.wheels import ROOT

# Linux gives a process of this niceness 110 shares beside one of 1024.
NICENESS = 10
UNIT = ROOT / "tests/unit"
# What waits for something, or draws examples.
TIMED = sorted(
    str(path.relative_to(ROOT))
    for path in UNIT.glob("test_*.py")
    if re.search(
        r"^from (tests\.unit\.waiting|hypothesis) import|time\.sleep", path.read_text("utf-8"), re.MULTILINE
    )
)


@contextmanager
def busy() -> Iterator[None]:
    """One process for each core, all in this session, so that Linux weighs them against the suite."""
    endless = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(endless) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def slowed(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["nice", "-n", str(NICENESS), sys.executable, *words]
    with busy():
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_slowed_process_gets_about_a_tenth() -> None:
    """Else the cases below would show nothing."""
    if os.nice(0) + NICENESS > 19:
        pytest.skip("this process is so nice already that Linux knows nothing nicer")
    count = "import time; t = time.process_time(); [i * i for i in range(3_000_000)]; print(time.process_time() - t)"
    begun = time.monotonic()
    done = slowed("-c", count)
    seconds = time.monotonic() - begun
    assert seconds > 4 * float(done.stdout), "a slowed process had more than a quarter of a core"


@parts([0, 2, 4, 6, 8])
def test_unit_tests_that_wait_are_green(part: str) -> None:
    at, of = map(int, part.split("/"))
    files = TIMED[at - 1 :: of]
    assert files
    done = slowed("-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses=2", *files)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr

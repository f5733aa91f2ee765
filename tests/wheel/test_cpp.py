"""The library for C and C++ that the wheel brings passes its own tests, which are a program."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from flash_attn import cpp

pytestmark = pytest.mark.gpu


def _folders() -> list[str]:
    """Where the library lies, and the CUDA runtime that torch loaded."""
    loaded = re.findall(r"(/\S+)/libcudart\.so\.\d+", Path("/proc/self/maps").read_text())
    return [str(Path(cpp.library()).parent), *dict.fromkeys(loaded)]


def test_the_program_of_its_tests_passes(pytestconfig: pytest.Config) -> None:
    """It says which of them were skipped, and why: for want of kernels, or of a second GPU."""
    program = pytestconfig.getoption("--cpp-tests")
    if program is None:
        pytest.skip("no program was given: --cpp-tests FILE, which nox -s verify -- --write-cpp-tests makes")
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(_folders())}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
    passed = re.search(r"\[  PASSED  \] (\d+) tests", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) > 100, done.stdout[-5000:]
    assert "no GPU" not in done.stdout

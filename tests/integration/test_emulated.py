"""The row contract on kernels that run here: real nvcc's PTX of real upstream, interpreted. No proof of a wheel, and no stand-in for one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.errors import VerifyError

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

ROOT = Path(__file__).resolve().parents[2]


def emulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "scripts", "emulate", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_rows_keep_their_bits_under_emulation() -> None:
    done = emulate("--pytest=-ra")
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
    assert "skipped" not in done.stdout, "a case was left out"


def test_a_failure_is_an_error() -> None:
    done = emulate("--pytest=-k", "--pytest=nothing_has_this_name")
    assert done.returncode == VerifyError.exit_code
    assert "the suite failed under emulation" in done.stderr

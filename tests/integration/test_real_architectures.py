"""A real kernel file, compiled with PTX of its own and with shared PTX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.in_turn(2)
def test_machine_code_from_shared_ptx_is_that_of_its_own() -> None:
    command = [
        sys.executable,
        "-m",
        "scripts",
        "archs",
        "--kernels",
        "hdim32,fp16,fwd,causal",
        "--arch",
        "90",
        "--source",
        "sdist",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 kernels: the same machine code from shared PTX as from their own." in done.stdout

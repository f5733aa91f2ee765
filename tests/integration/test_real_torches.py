"""One file serves several torches and Pythons: it installs, imports and says what is wrong with calls beside each.

Pairs take turns by the number of commits. No GPU is needed, and nothing is proved. A torch and its CUDA libraries
take some GB of disk: where there are fewer, or pip's constraints allow no such torch, a case is skipped, and says so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.base.errors import ToolchainError
from scripts.wheels.toolchain import compilers
from tests.integration.wheels import KERNELS, ROOT, said

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

# Turn, target, torch and Python. Those of CUDA 12 come with test_real_toolkits, which brings its compiler.
PAIRS = [
    (0, "cu13", "2.15.0", "3.13"),
    (1, "cu12", "2.6.0", "3.10"),
    (1, "cu12", "2.10.0", "3.13"),
    (3, "cu13", "2.13.0", "3.10"),
    (5, "cu12", "2.9.1", "3.12"),
    (5, "cu12", "2.7.1", "3.11"),
    (7, "cu13", "2.14.1", "3.11"),
    (9, "cu13", "2.12.1", "3.12"),
]
BYTES = 14e9  # of disk: pip's download and what it becomes, and the next call's


@pytest.mark.parametrize(
    ("target", "torch", "python"),
    [
        pytest.param(*pair, id=f"{pair[0]}-torch{pair[1]}-py{pair[2]}", marks=pytest.mark.in_turn(turn))
        for turn, *pair in PAIRS
    ],
)
def test_a_wheel_serves_torches_and_pythons(target: str, torch: str, python: str, tmp_path: Path) -> None:
    try:
        compilers.find_python(python)
    except ToolchainError as missing:
        pytest.skip(str(missing))
    free = shutil.disk_usage(ROOT).free
    if free < BYTES:
        pytest.skip(f"torch {torch} needs {BYTES / 1e9:.0f} GB of disk, and {free / 1e9:.0f} are free")
    wanted = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    offered = subprocess.run([*wanted, f"torch=={torch}"], capture_output=True, text=True, check=False)
    if "ResolutionImpossible" in offered.stderr:  # pip's constraints cap it
        pytest.skip(f"pip finds no torch {torch}: {offered.stderr.strip().splitlines()[-1]}")
    assert offered.returncode == 0, offered.stderr
    said("build", "--target", target, "--kernels", KERNELS, "--source", "sdist", "--out", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    chosen = ("--pytest=-k", "--pytest=test_static")
    told = said("verify", "--torch", torch, "--python", python, wheel, *chosen)
    assert f"Python {python}, torch {torch}, the wheel" in told
    assert f"torch {torch}+" in told

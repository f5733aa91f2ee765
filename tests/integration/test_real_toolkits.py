"""A CUDA toolkit that the package index lacks, assembled from Debian's package, compiles a real kernel file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.source import matrix

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.in_turn(1, 5)
def test_a_kernel_file_is_compiled_by_the_assembled_toolkit() -> None:
    target = matrix.load(ROOT / "wheel_matrix.toml").named("cu12")
    command = [
        sys.executable,
        "-m",
        "scripts",
        "build",
        "--target",
        target.name,
        "--kernels-only",
        "--kernels",
        "hdim32,fp16,fwd,causal",
    ]
    done = subprocess.run(
        [*command, "--source", "sdist"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nvcc V12.4.131" in done.stdout
    (folder,) = [p for p in layout.cache("toolkit").glob(f"{target.toolkit}-*-with-lib") if p.is_dir()]
    objects = Path(done.stdout.rsplit("objects in ", 1)[1].replace("\n", "").strip())
    shown = subprocess.run(
        [folder / "bin/cuobjdump", "--list-elf", objects / "fwd_hdim32_fp16_causal.o"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.split() == ["ELF", "file", "1:", shown.split()[-1]]
    assert ".sm_90." in shown
    assert (folder / "lib/libcudart.so.12").is_file(), "which the extension is linked against"

"""A CUDA toolkit that the package index lacks, assembled from Debian's package, compiles a real kernel file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.base import layout
from tests.integration.wheels import KERNELS, MATRIX, said

pytestmark = [pytest.mark.network, pytest.mark.nvcc]


@pytest.mark.in_turn(1, 5)
def test_a_kernel_file_is_compiled_by_the_assembled_toolkit() -> None:
    target = MATRIX.named("cu12")
    told = said("build", "--target", "cu12", "--kernels-only", "--kernels", KERNELS, "--source", "sdist")
    assert "nvcc V12.4.131" in told
    (folder,) = [p for p in layout.cache("toolkit").glob(f"{target.toolkit}-*-with-lib") if p.is_dir()]
    objects = Path(told.rsplit("objects in ", 1)[1].replace("\n", "").strip())
    shown = subprocess.run(
        [folder / "bin/cuobjdump", "--list-elf", objects / "fwd_hdim32_fp16_causal.o"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.split() == ["ELF", "file", "1:", shown.split()[-1]]
    assert ".sm_90." in shown
    assert (folder / "lib/libcudart.so.12").is_file(), "which the extension is linked against"

"""Kernel files of head dims that no other test compiles pass the compiler's front end, where layouts must divide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.wheels.compiling import kernels
from tests.integration.wheels import applied, nvcc

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

# By turn, for a front end takes up to a minute a file. Causal kernels and bfloat16 have the same layouts.
TURNS = [(96, "90"), (192, "90"), (256, "90"), (96, "80"), (192, "80"), (256, "80")]
WRONG = """
template<int kArch>
__global__ void kernel() { static_assert(kArch != WRONG_ARCH, "found"); }
#ifdef __CUDA_ARCH__
template __global__ void kernel<__CUDA_ARCH__>();
#endif
"""


def errors(arch: str, source: Path, *options: str) -> str:
    """What nvcc says as far as templates are instantiated for that GPU: the optimiser takes ten times as long.

    It ends with 1 whatever it found, for no PTX was made.
    """
    done = nvcc(arch, "compute", *options, "-Xcicc=--no_code_gen", "-ptx", "-o", "/dev/null", source)
    return done.stdout + done.stderr


@pytest.mark.parametrize("arch", ["80", "90"])
def test_the_front_end_alone_fails_an_assertion(arch: str, tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text(WRONG, encoding="utf-8")
    found = errors(arch, source, f"-DWRONG_ARCH={arch}0")
    assert 'static assertion failed with "found"' in found
    assert errors(arch, source, "-DWRONG_ARCH=0") == ""


@pytest.mark.parametrize("kind", ["fwd", "fwd_split", "bwd"])
@pytest.mark.parametrize(
    ("head_dim", "arch"),
    [pytest.param(*case, marks=pytest.mark.in_turn(turn)) for turn, case in enumerate(TURNS)],
)
def test_layouts_divide_at_head_dims_that_no_other_test_compiles(kind: str, head_dim: int, arch: str) -> None:
    root = applied().root
    source = root / f"csrc/flash_attn/src/flash_{kind}_hdim{head_dim}_fp16_sm80.cu"
    includes = (f"-I{root / folder}" for folder in kernels.INCLUDES)
    found = errors(arch, source, *includes)
    assert not re.search(r"error|fatal|not found", found), found

"""The row contract on kernels that run here: real nvcc's PTX of real upstream, interpreted. No proof of a wheel, and no stand-in for one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import VerifyError
from scripts.base.process import run
from scripts.lab import emulator
from tests.integration.test_slow_machine import slowed
from tests.integration.turns import TURNS, parts
from tests.integration.wheels import KERNELS, said, scripts, tools

SMALL = "hdim32,fp16,causal"  # a file of each pass
pytestmark = [pytest.mark.network, pytest.mark.nvcc]


def emulated(*arguments: str) -> str:
    """What the suite says of cases that pass, none of them left out."""
    told = said("emulate", "--pytest=-ra", *arguments)
    assert "skipped" not in told, "a case was left out"
    return told


@pytest.mark.path
def test_rows_of_the_standard_kernel_keep_their_bits() -> None:
    """Of one kernel file, which the wheel has too."""
    emulated("--kernels", KERNELS, "--pytest=-k", "--pytest=test_standard")


@parts([*range(TURNS)])
def test_rows_keep_their_bits_under_emulation(part: str) -> None:
    emulated(f"--pytest=--part={part}")


@pytest.mark.in_turn(3)
def test_the_cpp_api_s_own_tests_pass_under_emulation() -> None:
    told = said("emulate", "--cpp")
    skipped = set(re.findall(r"Skipped\n(.*)", told))
    # What such a build lacks, or an emulated GPU: all else ran.
    others = {
        why for why in skipped if not re.match(r"this build has no kernels for head dim \d+ in \w+$", why)
    }
    assert others == {
        "needs a real GPU, this one is emulated",
        "needs two GPUs, there is 1",
        "there is a GPU",
    }
    assert not re.search(r"no kernels for head dim (8|16|32) in float16", told)


def test_a_few_small_calls_of_each_pass() -> None:
    emulated("--kernels", SMALL, "--pytest=-k", "--pytest=test_small")


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(
            "sglang",
            marks=[
                pytest.mark.in_turn(2),
                pytest.mark.skipif(
                    not (3, 11) <= sys.version_info < (3, 13),
                    reason="SGLang or what it needs has no wheel here",
                ),
            ],
        ),
        pytest.param(
            "vllm",
            marks=[
                pytest.mark.in_turn(9),
                pytest.mark.skipif(
                    sys.version_info < (3, 11), reason="what vLLM needs has no wheel for this Python"
                ),
            ],
        ),
    ],
)
def test_an_engine_s_own_classes_call_the_kernels(client: str) -> None:
    emulated("--client", client)


@pytest.mark.in_turn(2)
def test_kernels_without_mask_and_bias() -> None:
    chosen = ("--kernels", "hdim32,fp16,split,causal,no-bias", "--pytest=-k", "--pytest=left_out")
    assert "1 passed" in said("emulate", *chosen)


@pytest.mark.in_turn(7)
def test_kernels_for_up_to_16_rows() -> None:
    assert re.search(
        r"\d+ passed", emulated("--kernels", "hdim64,fp16,split", "--pytest=-k", "--pytest=narrow")
    )


@pytest.mark.in_turn(7)
def test_cases_are_green_at_a_tenth_of_the_speed() -> None:
    chosen = ("--kernels", KERNELS, "--pytest=-k", "--pytest=test_standard")
    done = slowed("-m", "scripts", "emulate", *chosen)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr


def test_a_failure_is_an_error() -> None:
    done = scripts("emulate", "--pytest=-k", "--pytest=nothing_has_this_name")
    assert done.returncode == VerifyError.exit_code
    assert "the suite failed under emulation" in done.stderr


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of small kernels on the emulator, without torch."""
    found = tools(cache=False)
    folder = tmp_path_factory.mktemp("faults")
    source, made = emulator.SUITE / "faults.cu", folder / "faults.o"
    nvcc: list[str | Path] = [found.toolkit.nvcc, *emulator.FLAVOUR.code, f"-ccbin={found.cxx}"]
    run([*nvcc, "-c", source, "-o", made], error=VerifyError, what="could not build the small kernels")
    objects = emulator.interpreter(found, layout.BUILD / "emulator", torch=False)
    program: list[str | Path] = [found.cxx, made, *objects, "-o", folder / "faults"]
    run(program, error=VerifyError, what="could not link the small kernels")
    return folder / "faults"


@pytest.mark.parametrize(
    ("kernel", "status", "said"),
    [
        ("right", 0, "63.0"),
        ("race", 1, "race in shared memory: written after warp 0 read"),
        ("beyond", 1, "write of 4 bytes outside any allocation"),
        ("misaligned", 1, "misaligned address"),
        ("absent", 1, "a lane does not come to the barrier of its warp"),
        ("late", 0, "1.0"),
        ("vote", 0, "1.0"),
        ("copied", 0, "3.0"),
        ("unwaited", 0, "nan"),
        ("arithmetic", 0, ""),
        ("product", 0, "0.0"),
        ("sums", 0, "0.0"),
        ("fused", 0, "1.0"),
        ("rounded", 0, "0.0"),
    ],
)
def test_what_the_emulator_says_of_kernels_that_are_wrong_in_one_way(
    faults: Path, kernel: str, status: int, said: str
) -> None:
    done = subprocess.run([faults, kernel], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout
    assert said in done.stdout
    assert status == 0 or f"in {kernel}(float*)" in done.stdout


def test_a_limit_of_shared_memory_that_is_lowered_is_an_error(faults: Path) -> None:
    done = subprocess.run([faults, "lowered"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.startswith("the limit of shared memory is lowered")) == (1, True)

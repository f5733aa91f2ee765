"""What a call asks of CUDA: a library by the real compilers, on a CUDA runtime that counts, for there is no GPU."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from scripts.lab import emulated_library
from scripts.wheels.compiling import kernels
from scripts.wheels.toolchain import tvm_ffi
from scripts.wheels.trust import binaries
from tests.integration.test_cpp_examples import cuda_runtime
from tests.integration.wheels import applied, said, tools

pytestmark = [pytest.mark.network, pytest.mark.nvcc, pytest.mark.in_turn(6)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launches")
    # Of head dim 64: below it no kernel asks for more shared memory, which is one of the calls that are counted.
    said("build", "--kernels", "hdim64,fp16,fwd,causal", "--source", "sdist", "--out", folder / "dist")
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    found = tools()
    assert found.ffi is not None
    own = applied().root / "csrc/flash_attn"
    headers = [own, own / "src", found.ffi.include, *emulated_library.cuda_headers(found)]
    libraries = [folder / binaries.LIBRARY_IN_WHEEL, folder / kernels.FORK.extension / binaries.EXTENSION]
    libraries += [found.ffi.lib / tvm_ffi.LIBRARY, cuda_runtime(found)]
    command: list[str | Path] = [found.cxx, "-std=c++17", Path(__file__).with_name("launches.cpp")]
    for path in headers:
        command += ["-isystem", path]
    command += ["-o", folder / "launches", "-Wl,--no-as-needed"]  # a loader's cache may have no CUDA
    for path in libraries:
        command += [path, f"-Wl,-rpath,{path.parent}"]
    subprocess.run(command, check=True)
    return folder / "launches"


def told(program: Path, *how: str) -> list[dict[str, int]]:
    """For each line that the program tells, CUDA's functions by how often they were called."""
    done = subprocess.run([program, *how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        {name: int(count) for name, count in (word.split("=") for word in line.split())}
        for line in done.stdout.splitlines()
    ]


def test_a_warm_call_launches_by_the_driver_and_asks_nothing_that_it_was_told(program: Path) -> None:
    first, first_elsewhere, again, again_elsewhere = told(program)
    assert first["cudaDeviceGetAttribute-of-0"] == first_elsewhere["cudaDeviceGetAttribute-of-1"] >= 5
    assert first["cudaFuncSetAttribute"] == first_elsewhere["cudaFuncSetAttribute"] == 1
    assert again == {"cudaGetDevice": 1, "cuLaunchKernel-on-0": 1}
    assert again_elsewhere == {"cudaGetDevice": 1, "cudaSetDevice": 2, "cuLaunchKernel-on-1": 1}


def test_the_runtime_launches_what_the_driver_refuses(program: Path) -> None:
    *_, again, again_elsewhere = told(program, "refuses")
    assert again == {"cudaGetDevice": 1, "cuLaunchKernel-on-0": 1, "cudaLaunchKernel-on-0": 1}
    assert again_elsewhere["cudaLaunchKernel-on-1"] == 1


def test_the_driver_is_given_no_kernel_that_the_runtime_says_it_has_no_code_for(program: Path) -> None:
    *_, again, again_elsewhere = told(program, "has-no-code")
    assert again == {"cudaGetDevice": 1, "cudaLaunchKernel-on-0": 1}
    assert again_elsewhere == {"cudaGetDevice": 1, "cudaSetDevice": 2, "cudaLaunchKernel-on-1": 1}


def test_the_framework_s_code_within_a_call_may_call_on_another_gpu(program: Path) -> None:
    (counts,) = told(program, "nested")
    assert counts["cuLaunchKernel-on-1"] == counts["afterwards-on-1"] == counts["cuLaunchKernel-on-0"] == 1

"""What a call asks of CUDA: a library by the real compilers, on a CUDA runtime that counts, for there is no GPU."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.lab import emulated_library
from scripts.source import matrix
from scripts.wheels import toolchain
from tests.integration.test_real_wheel import build

pytestmark = [pytest.mark.network, pytest.mark.nvcc]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launches")
    build(folder / "dist")
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    api = folder / "flash_attn/cpp"
    tools = toolchain.assemble(matrix.load(layout.MATRIX).default(), None, layout.BUILD, cache=True)
    headers = [api / "include", *emulated_library.cuda_headers(tools)]
    root = tools.toolkit.nvcc.parent.parent
    runtime = next(path for name in ("lib64", "lib") for path in (root / name).glob("libcudart.so.*"))
    subprocess.run(
        [
            *(tools.cxx, "-std=c++17", *(word for path in headers for word in ("-isystem", path))),
            *(Path(__file__).with_name("launches.cpp"), "-o", folder / "launches"),
            *(api / "lib/libflash_attention_v2.so.1", runtime),
            *(f"-Wl,-rpath,{path.parent}" for path in (api / "lib/any", runtime)),
        ],
        check=True,
    )
    return folder / "launches"


def calls(program: Path, *how: str) -> list[dict[str, int]]:
    """By CUDA's functions, how often each was called in the first call of a process, and in the second."""
    done = subprocess.run([program, *how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        {name: int(count) for name, count in (word.split("=") for word in line.split())}
        for line in done.stdout.splitlines()
    ]


def test_a_warm_call_launches_by_the_driver_and_asks_nothing_that_it_was_told(program: Path) -> None:
    first, second = calls(program)
    assert first["cudaDeviceGetAttribute"] >= 3
    assert first["cudaFuncSetAttribute"] == 1
    assert second.pop("cudaGetDevice") == 3  # which GPU is the current one: a program may change it
    assert second == {"cuLaunchKernel": 1}


def test_the_runtime_launches_what_the_driver_refuses(program: Path) -> None:
    for counts in calls(program, "refuses"):
        assert counts["cuLaunchKernel"] == counts["cudaLaunchKernel"] == 1


def test_the_driver_is_given_no_kernel_that_the_runtime_did_not_find(program: Path) -> None:
    for counts in calls(program, "has-no-code"):
        assert counts["cudaLaunchKernel"] == 1
        assert "cuLaunchKernel" not in counts

"""Small files by the real nvcc on workers: the same objects as alone, and a worker with another nvcc refused."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.source import kernel_set, matrix
from scripts.wheels.cluster import compile_history, dispatch, work_list
from scripts.wheels.compiling import kernels, ninja
from scripts.wheels.toolchain import compilers
from tests.unit.conftest import plan
from tests.unit.test_cluster import processes

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

TARGET = matrix.load(layout.MATRIX).default()
KERNELS = kernel_set.parse_kernels("hdim64,fp16,fwd")
SOURCE = """#include "named.h"
namespace {{ __device__ int hidden = {number}; }}
template <int N> __global__ void fill(int *out) {{ out[threadIdx.x] = N + hidden; }}
void launch(int *out) {{ fill<{number}><<<1, 32>>>(out); }}
"""


def stripped(path: Path, folder: Path) -> bytes:
    """An object without its symbol table, where nvcc's temporary names are; the link strips it too."""
    out = folder / f"stripped-{path.name}"
    subprocess.run(["objcopy", "--strip-unneeded", path, out], check=True)
    return out.read_bytes()


def other_nvcc(folder: Path, real: compilers.Toolkit) -> Path:
    """A CUDA of the same release whose nvcc has another build number."""
    (folder / "bin").mkdir(parents=True)
    (folder / "include").symlink_to(real.include[0])
    script = folder / "bin/nvcc"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "release {real.release}, V{real.release}.1" && exit\nexec {real.nvcc} "$@"\n'
    )
    script.chmod(0o755)
    return folder


def test_objects_of_workers_are_those_of_one_machine_and_another_nvcc_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_history, "_path", lambda: tmp_path / "seen.json")  # these are no kernel files
    tools = compilers.assemble(TARGET, None, tmp_path / "build", cache=False)
    planned = plan(tmp_path, tools, KERNELS)
    for number, kernel in enumerate(KERNELS):
        (planned.tree.root / "csrc/flash_attn/src" / kernel.source).write_text(SOURCE.format(number=number))
    (planned.tree.root / "csrc/flash_attn/src/named.h").write_text("#pragma once\n")
    planned = dataclasses.replace(planned, tree=dataclasses.replace(planned.tree, seen=time.time_ns()))
    units = tuple(kernels.kernel_units(planned))
    alone = {path: stripped(path, tmp_path) for path in ninja.compile_units(planned, [*units], 1).objects}
    for path in alone:
        path.unlink()
    other = str(other_nvcc(tmp_path / "cuda", tools.toolkit))
    with processes(a={}, b={}, other={"CUDA_HOME": other}) as (client, _):
        done, failed = dispatch.compile_on(client, [work_list.Share(planned, units, TARGET)], 1)
    assert not failed
    assert {path: stripped(path, tmp_path) for path in done.objects} == alone
    said = capsys.readouterr()
    assert (
        f"is refused: its nvcc is V{tools.toolkit.release}.1, the build's is {tools.toolkit.version}."
        in said.err
    )
    assert said.err.count("worker other (") == 1
    assert "worker a (" in said.out

"""Kernel files on workers of Dask, with a compiler that is a shell script."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from scripts.base import layout
from scripts.base.errors import CompileError, ToolchainError, UsageError
from scripts.source import kernel_set, matrix
from scripts.wheels import cluster, cluster_compile, cluster_tasks, compiling, kernels, seen
from scripts.wheels.toolchain import Toolchain
from tests.unit.conftest import KERNELS, compile_all, plan, toolchain

TARGET = matrix.load(layout.MATRIX).default()


@dataclasses.dataclass(frozen=True)
class Found:
    """How a worker finds the toolchain of a test; by the worker's name it may be another's."""

    tools: Toolchain
    nvcc: dict[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, target: matrix.Target, cache: bool) -> Toolchain:
        return self.tools


@pytest.fixture
def client() -> Iterator[Client]:
    with cluster.connected(cluster.parse("local:2"), 2) as connected:
        yield connected


def share(tmp_path: Path, tools: Toolchain, chosen: Any = KERNELS) -> cluster_compile.Share:
    planned = plan(tmp_path, tools, chosen)
    return cluster_compile.Share(planned, tuple(kernels.kernel_units(planned)), TARGET)


COMPILER = 'case $last in -*) exit 3;; esac; for w; do case $w in *.cu) s=$w;; esac; done; cat "$s" > "$last"; echo "$s" >> "$0.calls"\n'


def test_objects_of_workers_are_those_of_this_machine(client: Client, tmp_path: Path) -> None:
    tools = toolchain(tmp_path, COMPILER)
    alone = compile_all(tmp_path, tools)
    expected = {path.name: path.read_bytes() for path in alone.objects}
    for path in alone.objects:
        path.unlink()
    done, failed = cluster_compile.compile_on(client, [share(tmp_path, tools)], None, Found(tools))
    assert not failed
    assert {path: path.read_bytes() for path in done.objects} == {p: expected[p.name] for p in alone.objects}
    assert compile_all(tmp_path, tools).built == 0, "ninja takes them as they are"

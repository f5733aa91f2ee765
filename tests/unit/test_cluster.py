"""Kernel files on workers of Dask, with a compiler that is a shell script."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker

from scripts.base import layout
from scripts.base.errors import ToolchainError
from scripts.source import matrix
from scripts.wheels import cluster, cluster_compile, cluster_files, kernels, seen
from scripts.wheels.toolchain import Toolchain
from tests.unit.conftest import KERNELS, compile_all, plan, toolchain

TARGET = matrix.load(layout.MATRIX).default()


@dataclasses.dataclass(frozen=True)
class Found:
    """How a worker finds the toolchain of a test."""

    tools: Toolchain

    def __call__(self, *_: object) -> Toolchain:
        return self.tools


@dataclasses.dataclass(frozen=True)
class FoundByItsVariable:
    """The same, but where a variable says so a worker has another nvcc, or none."""

    tools: Toolchain

    def __call__(self, *_: object) -> Toolchain | str:
        version = os.environ.get("ITS_NVCC")
        if version == "none":
            return "it has no CUDA 13.0"
        toolkit = dataclasses.replace(self.tools.toolkit, version=version or self.tools.toolkit.version)
        return dataclasses.replace(self.tools, toolkit=toolkit)


@contextmanager
def processes(**named: dict[str, str]) -> Iterator[tuple[Client, SpecCluster]]:
    """Workers that are processes of their own, by their names, each with its variables."""
    workers = {
        name: {"cls": Nanny, "options": {"nthreads": 1, "env": env, "dashboard_address": "127.0.0.1:0"}}
        for name, env in named.items()
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": "127.0.0.1:0", "port": 0}}
    with SpecCluster(workers=workers, scheduler=scheduler) as cluster_, Client(cluster_) as client:
        client.wait_for_workers(len(named), timeout=60)
        yield client, cluster_


def calls(tools: Toolchain) -> list[list[str]]:
    path = Path(f"{tools.cxx}.calls")
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def until(done: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 60
    while not (found := done()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


@pytest.fixture
def client() -> Iterator[Client]:
    with cluster.connected(cluster.parse("local:2"), 2) as connected:
        yield connected


def share(tmp_path: Path, tools: Toolchain, chosen: Any = KERNELS) -> cluster_files.Share:
    planned = plan(tmp_path, tools, chosen)
    return cluster_files.Share(planned, tuple(kernels.kernel_units(planned)), TARGET)


# Like a compiler, it makes the object of the source; and it notes when it began, when it ended, and what.
COMPILER = """
for word; do case $word in *.cu) source=$word;; esac; done
name=$(basename "$last"); name=${name%%.*}
echo "begin $name $PPID" >> "$0.calls"
[ -e "$0.stop-$name" ] && rm "$0.stop-$name" && sleep 60
[ -e "$0.fail-$name" ] && echo "no such kernel" && exit 7
sleep ${PACE:-0}
cat "$source" > "$last"
echo "end $name $PPID" >> "$0.calls"
"""


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


def test_a_worker_that_dies_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends by kill -9 in the middle of a compile."""
    tools = toolchain(tmp_path, COMPILER)
    first = share(tmp_path, tools).units[0].target.stem
    Path(f"{tools.cxx}.stop-{first}").touch()  # the first to compile it does not come to its end
    with processes(a={}, b={}) as (client, _), ThreadPoolExecutor() as threads:
        build = threads.submit(
            cluster_compile.compile_on, client, [share(tmp_path, tools)], None, Found(tools)
        )
        (parent,) = {
            int(call[2])
            for call in until(lambda: [c for c in calls(tools) if c[:2] == ["begin", first]], "nothing begun")
        }
        (compiler,) = [p for p in psutil.Process(parent).children() if "compiler" in " ".join(p.cmdline())]
        psutil.Process(parent).kill()
        done, failed = build.result(timeout=60)
    assert not failed
    assert len(done.objects) == len(KERNELS)
    assert all(path.read_text() == f"// {path.stem}\n" for path in done.objects)
    assert [call[0] for call in calls(tools) if call[1] == first] == ["begin", "begin", "end"]
    assert not compiler.is_running() or compiler.status() == psutil.STATUS_ZOMBIE, (
        "the compiler of the dead worker goes on"
    )
    assert "is gone; others get its tasks" in capsys.readouterr().err


def test_a_worker_whose_toolchain_differs_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = toolchain(tmp_path, COMPILER)
    with processes(good={}, other={"ITS_NVCC": "V12.4.131"}, bare={"ITS_NVCC": "none"}) as (client, _):
        named = dict(client.run(its_name_and_pid).values())
        done, failed = cluster_compile.compile_on(
            client, [share(tmp_path, tools)], None, FoundByItsVariable(tools)
        )
    said = capsys.readouterr()
    assert not failed
    assert len(done.objects) == len(KERNELS)
    assert {int(call[2]) for call in calls(tools)} == {named["good"]}
    assert "is refused: its nvcc is V12.4.131, the build's is V13.0.88." in said.err
    assert said.err.count("worker other (tcp://") == 1, "once, and by its name"
    assert "worker bare (" in said.err
    assert "is refused: it has no CUDA 13.0." in said.err
    assert "worker good (" in said.out


def its_name_and_pid(dask_worker: Worker) -> tuple[str, int]:
    return str(dask_worker.name), os.getpid()


def test_without_a_worker_that_fits_a_build_ends_and_names_each(tmp_path: Path) -> None:
    tools = toolchain(tmp_path, COMPILER)
    with processes(other={"ITS_NVCC": "V12.4.131"}) as (client, _):
        _, failed = cluster_compile.compile_on(
            client, [share(tmp_path, tools)], None, FoundByItsVariable(tools)
        )
    (error,) = failed.values()
    assert isinstance(error, ToolchainError)
    assert re.search(
        r"no worker has the toolchain of cu130-torch2\.11, nvcc V13.*\n    worker other: its nvcc is V12",
        str(error),
    )
    assert not calls(tools)


def test_the_longest_file_starts_first_and_memory_bounds_how_many(client: Client, tmp_path: Path) -> None:
    """A file that was seen to take all the memory runs alone."""
    tools = toolchain(tmp_path, COMPILER)
    mine = share(tmp_path, tools)
    names = [unit.target.stem for unit in mine.units]
    for name in reversed(names):  # the last of the table is the longest by far
        taken = seen.Taken(seconds=1000.0 + names.index(name), memory=1e15)
        seen.note(
            seen.name_of(next(u for u in mine.units if u.target.stem == name), TARGET.cuda, ("90",)), taken
        )
    with cluster.connected(cluster.parse("local"), 4) as one:
        done, _ = cluster_compile.compile_on(one, [mine], None, Found(tools))
    begun = [call for call in calls(tools) if call[0] == "begin"]
    assert [call[1] for call in begun] == names[::-1]
    assert [call[0] for call in calls(tools)] == ["begin", "end"] * len(names), "two at once"
    assert len(done.objects) == len(names)

"""Kernel files on workers of Dask, with a compiler that is a shell script."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask.config
import psutil
import pytest
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker

from scripts.base import layout
from scripts.base.errors import BuildError, CompileError, SeriesError, ToolchainError, UsageError
from scripts.series.tree import Snapshot
from scripts.source import matrix
from scripts.wheels.building import build
from scripts.wheels.building.jobs import Job
from scripts.wheels.cluster import (
    compile_history,
    compile_jobs,
    dispatch,
    dry_run,
    schedulers,
    source_archive,
    tasks,
    work_list,
)
from scripts.wheels.compiling import kernels, ninja
from scripts.wheels.proof import machine_gpus
from scripts.wheels.toolchain.compilers import Toolchain
from tests.unit import forked
from tests.unit.conftest import KERNELS, Command, compile_all, plan, source_tree, toolchain
from tests.unit.waiting import PATIENCE, until

# Dask warns of a machine that is busy; what a test says of time it says itself.
pytestmark = pytest.mark.filterwarnings("ignore:Creating scratch directories:UserWarning")
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


def worker(env: dict[str, str]) -> dict[str, Any]:
    options = {"nthreads": 1, "env": {**os.environ, **env}, "dashboard_address": "127.0.0.1:0"}
    return {"cls": Nanny, "options": options}


@contextmanager
def processes(**named: dict[str, str]) -> Iterator[tuple[Client, SpecCluster]]:
    """Workers that are processes of their own, by their names, each with its variables."""
    forked.context()
    workers = {name: worker(env) for name, env in named.items()}
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": "127.0.0.1:0", "port": 0}}
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        SpecCluster(workers=workers, scheduler=scheduler) as cluster_,
        Client(cluster_) as client,
    ):
        if named:
            client.wait_for_workers(len(named), timeout=PATIENCE)
        yield client, cluster_


def calls(tools: Toolchain) -> list[list[str]]:
    path = Path(f"{tools.cxx}.calls")
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def client() -> Iterator[Client]:
    with schedulers.connected(schedulers.parse("local:2"), 2) as connected:
        yield connected


def share(tmp_path: Path, tools: Toolchain, chosen: Any = KERNELS) -> work_list.Share:
    planned = plan(tmp_path, tools, chosen)
    return work_list.Share(planned, tuple(kernels.kernel_units(planned)), TARGET)


# Like a compiler, it makes the object of the source; and it notes when it began, when it ended, and what.
# In company, the first of each two that begin ends when the second has begun; the file says how many begin alone.
COMPILER = """
for word; do case $word in *.cu) source=$word;; esac; done
name=$(basename "$last"); name=${name%%.*}
case "$*" in *sm_90*) gpu=sm_90;; *) gpu=sm_80;; esac
echo "begin $name $PPID" >> "$0.calls"
[ -e "$0.stop-$name" ] && rm "$0.stop-$name" && sleep 6000
[ -e "$0.fail-$name-$gpu" ] && echo "no such kernel" && exit 7
if [ -e "$0.company" ]; then
    own=$(sed "/begin $name /q" "$0.calls" | grep -c begin)
    second=$((own + (own - $(cat "$0.company")) % 2)) waited=0
    while [ $second -le ALL ] && [ $(grep -c begin "$0.calls") -lt $second ] && [ $waited -lt 30000 ]; do
        waited=$((waited + 1)) && sleep 0.02
    done
fi
sleep ${PACE:-0}
cat "$source" > "$last"
echo "end $name $PPID" >> "$0.calls"
""".replace("ALL", str(len(KERNELS)))


def test_objects_of_workers_are_those_of_this_machine(client: Client, tmp_path: Path) -> None:
    tools = toolchain(tmp_path, COMPILER)
    alone = compile_all(tmp_path, tools)
    expected = {path.name: path.read_bytes() for path in alone.objects}
    for path in alone.objects:
        path.unlink()
    done, failed = dispatch.compile_on(client, [share(tmp_path, tools)], None, Found(tools))
    assert not failed
    assert {path: path.read_bytes() for path in done.objects} == {p: expected[p.name] for p in alone.objects}
    assert compile_all(tmp_path, tools).built == 0, "ninja takes them as they are"


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_worker_that_dies_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends by kill -9 in the middle of a compile."""
    tools = toolchain(tmp_path, COMPILER)
    first = share(tmp_path, tools).units[0].target.stem
    Path(f"{tools.cxx}.stop-{first}").touch()  # the first to compile it does not come to its end
    with processes(a={}, b={}) as (client, _), ThreadPoolExecutor() as threads:
        build = threads.submit(dispatch.compile_on, client, [share(tmp_path, tools)], None, Found(tools))
        (parent,) = {
            int(call[2])
            for call in until(lambda: [c for c in calls(tools) if c[:2] == ["begin", first]], "nothing begun")
        }
        (compiler,) = [p for p in psutil.Process(parent).children() if "compiler" in " ".join(p.cmdline())]
        psutil.Process(parent).kill()
        done, failed = build.result(PATIENCE)
    assert not failed
    assert len(done.objects) == len(KERNELS)
    assert all(path.read_text() == f"// {path.stem}\n" for path in done.objects)
    assert [call[0] for call in calls(tools) if call[1] == first] == ["begin", "begin", "end"]
    until(lambda: gone(compiler), "the end of the dead worker's compiler")
    assert "is gone; others get its tasks" in capsys.readouterr().err


def test_a_worker_whose_toolchain_differs_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = toolchain(tmp_path, COMPILER)
    with processes(good={}, other={"ITS_NVCC": "V12.4.131"}, bare={"ITS_NVCC": "none"}) as (client, _):
        named = dict(client.run(its_name_and_pid).values())
        done, failed = dispatch.compile_on(client, [share(tmp_path, tools)], None, FoundByItsVariable(tools))
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
        _, failed = dispatch.compile_on(client, [share(tmp_path, tools)], None, FoundByItsVariable(tools))
    (error,) = failed.values()
    assert isinstance(error, ToolchainError)
    assert re.search(
        r"no worker has the toolchain of cu13, nvcc V13.*\n    worker other: its nvcc is V12",
        str(error),
    )
    assert not calls(tools)


def test_the_longest_file_starts_first_and_memory_bounds_how_many(client: Client, tmp_path: Path) -> None:
    """A file that was seen to take all the memory runs alone."""
    tools = toolchain(tmp_path, COMPILER)
    mine = share(tmp_path, tools)
    names = [unit.target.stem for unit in mine.units]
    for name in reversed(names):  # the last of the table is the longest by far
        taken = compile_history.Taken(seconds=1000.0 + names.index(name), memory=1e15)
        compile_history.note(
            compile_history.name_of(
                next(u for u in mine.units if u.target.stem == name), TARGET.cuda, ("90",)
            ),
            taken,
        )
    with schedulers.connected(schedulers.parse("local"), 4) as one:
        done, _ = dispatch.compile_on(one, [mine], None, Found(tools))
    begun = [call for call in calls(tools) if call[0] == "begin"]
    assert [call[1] for call in begun] == names[::-1]
    assert [call[0] for call in calls(tools)] == ["begin", "end"] * len(names), "two at once"
    assert len(done.objects) == len(names)


def test_a_file_that_does_not_compile_is_told_with_its_worker_and_stops_no_other_plan(
    client: Client, tmp_path: Path
) -> None:
    tools = toolchain(tmp_path, COMPILER)
    mine, others = share(tmp_path, tools), dataclasses.replace(TARGET, name="another")
    planned = dataclasses.replace(mine.plan, architectures=("80",))
    second = work_list.Share(planned, tuple(kernels.kernel_units(planned)), others)
    broken = mine.units[0].target.stem
    Path(f"{tools.cxx}.fail-{broken}-sm_90").touch()
    done, failed = dispatch.compile_on(client, [mine, second], None, Found(tools))
    (key,) = failed
    assert key == mine.units[0].key
    assert re.search(
        rf"(?s)flash_\w+_sm80\.cu failed on worker \d with status 7:\n  exec .*{broken}\.o\n    no such kernel",
        str(failed[key]),
    )
    assert isinstance(failed[key], CompileError)
    assert {unit.target for unit in second.units} <= {*done.objects}
    assert not mine.units[0].target.exists()


# A signal may meet Dask's finalizer of a task, where Python reports it and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_stops_the_compilers_and_keeps_what_was_finished(client: Client, tmp_path: Path) -> None:
    tools = toolchain(tmp_path, COMPILER)
    mine = share(tmp_path, tools)
    stuck = mine.units[1].target.stem
    Path(f"{tools.cxx}.stop-{stuck}").touch()

    stopped = threading.Event()

    def interrupt() -> None:
        """As a user does: again where nothing happens."""
        until(mine.units[-1].target.exists, "the others were not finished")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        while not stopped.wait(PATIENCE / 10):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    # Where a shell runs this in the background, the signal is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                dispatch.compile_on(client, [mine], None, Found(tools))
            stopped.set()
            waiting.result()
    finally:
        stopped.set()
        signal.signal(signal.SIGINT, before)
    until(lambda: not compilers(tools), "the end of the compilers")
    assert [unit.target.stem for unit in mine.units if not unit.target.exists()] == [stuck]
    done, _ = dispatch.compile_on(client, [mine], None, Found(tools))
    assert [path.stem for path in done.objects] == [stuck], "the same goes on"


def compilers(tools: Toolchain) -> list[psutil.Process]:
    return [
        p
        for p in psutil.process_iter(["cmdline", "status"])
        if str(tools.cxx) in (p.info["cmdline"] or []) and p.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_a_worker_that_comes_later_gets_its_share(tmp_path: Path) -> None:
    tools = toolchain(tmp_path, COMPILER)
    Path(f"{tools.cxx}.company").write_text("0")
    with processes() as (client, cluster_), ThreadPoolExecutor() as threads:
        build = threads.submit(dispatch.compile_on, client, [share(tmp_path, tools)], None, Found(tools))
        for name in ("first", "second"):
            cluster_.worker_spec[name] = worker({})
            cluster_.sync(cluster_._correct_state)
            until(lambda: calls(tools), "a call to the compiler")
        done, _ = build.result(PATIENCE)
    assert len(done.objects) == len(KERNELS)
    assert len({call[2] for call in calls(tools)}) == 2


def test_a_scheduler_that_is_gone_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    tools = toolchain(tmp_path, COMPILER)
    nowhere = schedulers.connected(schedulers.parse("tcp://127.0.0.1:9"))
    with monkeypatch.context() as impatient:
        impatient.setattr(schedulers, "_PATIENCE", 0.1)
        with pytest.raises(UsageError, match=r"no scheduler answers at tcp://127\.0\.0\.1:9"), nowhere:
            pass

    words = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    log = tmp_path / "scheduler.log"
    with log.open("w") as output:
        scheduler = subprocess.Popen(
            [*words, "--dashboard-address", "127.0.0.1:0"], stdout=output, stderr=output
        )
    (address,) = until(lambda: re.findall(r"Scheduler at: +(\S+)", log.read_text()), "no scheduler")
    with schedulers.connected(schedulers.parse(address)) as client, ThreadPoolExecutor() as threads:
        build = threads.submit(dispatch.compile_on, client, [share(tmp_path, tools)], None, Found(tools))
        until(lambda: any("no worker is there" in note for note in notes), "the wait for a worker")
        client._timeout = 0.1  # for connecting again, which is in vain
        scheduler.kill()
        scheduler.wait()
        with pytest.raises(
            CompileError, match=r"the scheduler is gone .* the same command goes on from there"
        ):
            build.result(PATIENCE)


def test_two_workers_compile_side_by_side_from_the_first_moment(client: Client, tmp_path: Path) -> None:
    """Dask would give all tasks with a common input to the worker that has it."""
    tools = toolchain(tmp_path, COMPILER)
    Path(f"{tools.cxx}.company").write_text("0")
    dispatch.compile_on(client, [share(tmp_path, tools)], None, Found(tools))
    assert [call[0] for call in calls(tools)][:2] == ["begin", "begin"]
    assert [call[0] for call in calls(tools)][-2:] == ["end", "end"]


def test_no_more_files_at_once_than_jobs(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACE", "0.1")
    tools = toolchain(tmp_path, COMPILER)
    dispatch.compile_on(client, [share(tmp_path, tools)], 1, Found(tools))
    assert [call[0] for call in calls(tools)] == ["begin", "end"] * len(KERNELS)


def test_a_file_for_which_the_memory_is_not_enough_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the first there is no room, though there is for two of the others."""
    monkeypatch.setenv("PACE", "0.1")
    tools = toolchain(tmp_path, COMPILER)
    mine = share(tmp_path, tools)
    Path(f"{tools.cxx}.company").write_text("1")
    for unit in mine.units:
        big = unit is mine.units[0]
        taken = compile_history.Taken(seconds=1000.0 if big else 1.0, memory=1e15 if big else 4e14)
        compile_history.note(compile_history.name_of(unit, TARGET.cuda, ("90",)), taken)
    with schedulers.connected(schedulers.parse("local"), 4) as one:
        dispatch.compile_on(one, [mine], None, Found(tools))
    said = [(call[0], call[1] == mine.units[0].target.stem) for call in calls(tools)]
    assert said[:2] == [("begin", True), ("end", True)], "another beside it"
    assert [word for word, _ in said[2:4]] == ["begin", "begin"], "two of the others at once"


def test_what_a_file_took_is_noted_and_a_damaged_note_is_refused(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = toolchain(tmp_path, 'until [ -e "$0.enough" ]; do :; done\n' + COMPILER)
    look = tasks._Spent.look

    def noticed(spent: tasks._Spent, processes: Iterable[psutil.Process]) -> None:
        look(spent, processes)
        if spent.seconds > 0.1:
            Path(f"{tools.cxx}.enough").touch()

    monkeypatch.setattr(tasks._Spent, "look", noticed)
    mine = share(tmp_path, tools, KERNELS[:1])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    dispatch.compile_on(client, [mine], None, Found(tools))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (taken,) = compile_history.read().files.values()
    of_children = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert 0.1 < taken.seconds <= of_children + 0.05, "with the ticks of two clocks"
    assert 1e5 < taken.memory < 1e9
    name = compile_history.name_of(mine.units[0], TARGET.cuda, ("90",))
    compile_history.note(name, compile_history.Taken(seconds=3, memory=1.0))
    assert compile_history.read().files[name] == compile_history.Taken(seconds=3, memory=taken.memory), (
        "the most memory"
    )
    layout.cache("seen.json").write_text("{}")
    with pytest.raises(CompileError, match=r"seen\.json is damaged: format: .*; delete it"):
        compile_history.read()


def test_the_same_sources_are_the_same_bytes_and_unpack_to_the_same_files(tmp_path: Path) -> None:
    source = source_tree(tmp_path).root
    (source / "csrc/flash_attn/flash_api.cpp").write_text("the binding\n")
    (source / "csrc/flash_attn/run.sh").write_text("#!/bin/sh\n")
    (source / "csrc/flash_attn/run.sh").chmod(0o755)
    first = source_archive.pack(Snapshot(source))
    shutil.copytree(source, tmp_path / "copy")
    (tmp_path / "copy/csrc/flash_attn/run.sh").chmod(0o600)
    assert source_archive.pack(Snapshot(tmp_path / "copy")) == first
    root = source_archive.unpacked(first, tmp_path)
    assert source_archive.unpacked(first, tmp_path) == root
    there = {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file()}
    assert there.keys() == {f"csrc/flash_attn/src/{k.source}" for k in KERNELS} | {"csrc/flash_attn/run.sh"}
    early = Snapshot(source, seen=0)
    with pytest.raises(SeriesError, match="changed while it was being built from"):
        source_archive.pack(early)


def test_a_worker_whose_commands_would_be_others_is_refused(client: Client, tmp_path: Path) -> None:
    tools = toolchain(tmp_path, COMPILER)
    mine = share(tmp_path, tools)
    other = dataclasses.replace(mine, units=tuple(dataclasses.replace(u, key="0" * 16) for u in mine.units))
    _, failed = dispatch.compile_on(client, [other], None, Found(tools))
    assert re.search(r"its digest of compilers and flags is \w{16}, the build's is 0{16}", str(failed))


@pytest.mark.parametrize("text", ["", "head:8786", "local:0", "slurm:x", "locals", "tcp://"])
def test_what_is_no_scheduler_is_refused_with_the_forms(text: str, command: Command) -> None:
    ended = command("build", "--scheduler", text)
    assert ended.status == 2
    assert re.search(r"is no scheduler: tcp://HOST:PORT .* local:WORKERS, or slurm:JOBS", ended.err)


def test_without_dask_a_build_says_what_to_install(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    ended = command("build", "--kernels", "hdim64,fp16,fwd", "--scheduler", "local")
    assert ended.status == 2
    assert "--scheduler needs Dask: pip install distributed dask-jobqueue" in ended.err


def test_a_build_without_the_option_imports_no_dask() -> None:
    code = "import scripts.commands.parser as p, sys; p.parse(['build']); print('distributed' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=layout.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("option", ["--stock", "--containers"])
def test_options_that_do_not_go_with_workers_are_refused(option: str, command: Command) -> None:
    ended = command("build", "--scheduler", "local", option)
    assert ended.status == 2
    assert "--scheduler compiles wheels' kernel files; leave out --stock and --containers." in ended.err


def ran(command: Command, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """The words of the program that ``cluster`` becomes."""
    become: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: become.append(words))
    ended = command("cluster", *arguments)
    assert ended.status == 0, ended.err
    return become[0][1:]


def test_a_scheduler_and_a_worker_are_dask_s_own_programs(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        machine_gpus, "found", lambda: (machine_gpus.Gpu("GPU-1", "H100", "9.0", "580.1"),) * 2
    )
    assert ran(command, monkeypatch, "scheduler", "--port", "9000") == [
        *("-m", "distributed.cli.dask_scheduler", "--port", "9000", "--no-dashboard")
    ]
    words = ran(command, monkeypatch, "worker", "tcp://head:8786", "--name", "one", "--jobs", "3")
    assert words[:7] == [
        "-m",
        "distributed.cli.dask_worker",
        "tcp://head:8786",
        "--nworkers",
        "1",
        "--nthreads",
        "3",
    ]
    assert words[-4:] == ["--name", "one", "--resources", "gpu=2"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "say what to run"),
        (("worker",), "name the scheduler: nox -s cluster -- worker tcp://HOST:8786."),
        (("worker", "local"), "name the scheduler"),
        (("worker", "tcp://head:1", "--port", "3"), "--port is for cluster -- scheduler."),
        (("scheduler", "--name", "x"), "are for cluster -- worker."),
    ],
)
def test_what_a_cluster_command_lacks_is_told(
    arguments: tuple[str, ...], says: str, command: Command
) -> None:
    ended = command("cluster", *arguments)
    assert ended.status == 2
    assert says in ended.err


def test_slurm_s_jobs_are_workers_of_this_python_as_dask_s_configuration_describes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        UsageError,
        match=r"Slurm's jobs are not described: .* lacks cores and memory",
    ):
        schedulers.slurm_cluster()
    described: dict[str, Any] = {
        "jobqueue.slurm.cores": 4,
        "jobqueue.slurm.memory": "24GB",
        "jobqueue.slurm.queue": "cpu",
    }
    described["jobqueue.slurm.job-extra-directives"] = ["--gres=gpu:1"]
    with dask.config.set(described), schedulers.slurm_cluster() as asked:
        script = asked.job_script()
    assert f"{sys.executable} -m distributed.cli.dask_worker tcp://" in script
    assert "#SBATCH -p cpu" in script
    assert "#SBATCH --cpus-per-task=4" in script
    assert "#SBATCH --gres=gpu:1" in script


def test_a_plan_names_each_worker_and_gives_the_longest_file_to_the_first_that_is_free(
    tmp_path: Path,
) -> None:
    tools = toolchain(tmp_path, COMPILER)
    with processes(a={}, b={}, other={"ITS_NVCC": "V12.4.131"}) as (client, _):
        todo = work_list.files_of([share(tmp_path, tools)], "run", FoundByItsVariable(tools))
        planned = dry_run.over(client, todo)
    workers = {worker.name: worker for worker in planned.workers}
    assert {name: worker.files for name, worker in workers.items()} == {"a": 3, "b": 3, "other": 0}
    assert workers["other"].toolchains == ()
    assert workers["a"].toolchains == ("13.0",)
    assert (
        sum(worker.until for worker in workers.values())
        == planned.cpu_seconds
        == 125 + 115 + 103 + 96 + 83 + 73
    )
    assert planned.longest == 125
    assert not calls(tools)


def test_a_build_has_its_kernel_files_compiled_and_goes_on_with_the_others_where_one_fails(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled: list[list[str]] = []
    built: list[str] = []
    broken = "cu13"

    def compile_for(loaded: object, jobs: list[Job], *_: object) -> dict[Job, BuildError]:
        compiled.append([job.target.name for job in jobs])
        return {job: CompileError("no") for job in jobs if job.target.name == broken}

    def build_one(loaded: object, job: Job, *_: object) -> build.Built:
        built.append(job.target.name)
        return build.Built(tmp_path, 1, "f" * 64, 1.0, ninja.Compiled((), 0, 0.0, 0, 0))

    monkeypatch.setattr(compile_jobs, "compile_for", compile_for)
    monkeypatch.setattr(build, "build_one", build_one)
    ended = command("build", "--target", "cu1[32]", "--scheduler", "local")
    assert compiled == [["cu13", "cu12"]]
    assert built == ["cu12"]
    assert ended.status == CompileError.exit_code


@dataclasses.dataclass(frozen=True)
class FoundByRelease:
    """A toolchain for each release of CUDA, with the same script as its compiler."""

    tools: Toolchain

    def __call__(self, target: matrix.Target, _: bool) -> Toolchain:
        toolkit = dataclasses.replace(self.tools.toolkit, release=target.cuda, version=f"V{target.cuda}.1")
        return dataclasses.replace(self.tools, toolkit=toolkit)


def test_all_targets_over_two_workers_with_one_killed(tmp_path: Path) -> None:
    """Of each target every third file, those of several targets once; one worker is killed after a third of them."""
    find = FoundByRelease(toolchain(tmp_path, 'echo "$*" > "$last"\n'))
    targets = matrix.load(layout.MATRIX).targets
    targets = (*targets, dataclasses.replace(targets[0], name="again"))  # whose files are the first's
    for kernel in {kernel for target in targets for kernel in target.kernels}:
        path = source_tree(tmp_path).root / "csrc/flash_attn/src" / kernel.source
        path.write_text(f"// {kernel.name}\n")
    root, shares = source_tree(tmp_path), []
    for target in targets:
        some = target.kernels[::3]
        planned = kernels.Plan(root, find(target, False), some, target.architectures, tmp_path / "build")
        shares.append(work_list.Share(planned, tuple(kernels.kernel_units(planned)), target))
    wanted = {unit.target for one in shares for unit in one.units}
    with processes(a={}, b={}) as (client, _), ThreadPoolExecutor() as threads:
        build = threads.submit(dispatch.compile_on, client, shares, None, find)
        until(lambda: sum(path.exists() for path in wanted) > len(wanted) / 3, "a third was not compiled")
        psutil.Process(next(iter(client.run(os.getpid).values()))).kill()
        done, failed = build.result(PATIENCE)
    assert not failed
    assert len({one.units[0].key for one in shares}) == len({(t.cuda, t.architectures) for t in targets})
    assert {*done.objects} == wanted == {path for path in wanted if path.exists()}
    assert len(done.objects) == len(wanted) < sum(len(one.units) for one in shares)

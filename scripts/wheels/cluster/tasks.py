"""What a worker does for a build: say whether its toolchain is the build's, and compile one file."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import psutil
from distributed import get_worker
from distributed.worker import thread_state

from scripts.base.errors import BuildError, CompileError
from scripts.base.process import last_lines, quoted, tied
from scripts.series.tree import Tree
from scripts.wheels.cluster import admission, source_archive
from scripts.wheels.compiling import compile_cache, flags, kernels, ninja
from scripts.wheels.toolchain import compilers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from scripts.source.kernel_set import Kernel
    from scripts.source.matrix import Target

Finder: TypeAlias = "Callable[[Target, bool], compilers.Toolchain | str]"
_PAUSE = 0.2  # seconds between two looks at a compiler


def on_this_machine(target: Target, cache: bool) -> compilers.Toolchain | str:
    """What compiles a target's kernels here, or why nothing does. Nothing is installed for that."""
    try:
        tools = compilers.present(target, Path(tempfile.gettempdir()))
    except BuildError as e:
        return str(e).rstrip(".")
    if tools is None:
        passed = compilers.installed_toolkit(target.cuda)[1]
        return f"it has no CUDA {target.cuda}" + (f" ({'; '.join(passed)})" if passed else "")
    return tools if cache else replace(tools, sccache=None)


@dataclass(frozen=True)
class Order:
    """What the files of one key have in common: all that decides what they become, but for the sources."""

    run: str  # of which build
    target: Target
    sample: Kernel
    architectures: tuple[str, ...]
    shared_ptx: Mapping[str, tuple[str, ...]]
    kernel_sources: str
    key: str  # the digest that names the folder of the objects
    nvcc: str  # the build's own versions
    cxx: str
    cache: bool
    find: Finder = on_this_machine

    @property
    def plugin(self) -> str:
        """The name of what asks workers, and brings them the sources."""
        return f"fa2-{self.run}"

    @property
    def resource(self) -> str:
        """What a worker with the same toolchain has."""
        return f"toolchain-{self.run}-{self.key}"

    def plan(self, tools: compilers.Toolchain, root: Path, kernel: Kernel | None = None) -> kernels.Plan:
        """The plan of a file, as the build itself would make it."""
        tree = Tree(root, "", "", "", "", self.kernel_sources)
        chosen = (kernel or self.sample,)
        return kernels.Plan(
            tree, tools, chosen, self.architectures, root.parent, shared_ptx=dict(self.shared_ptx)
        )

    def refusal(self) -> str:
        """Why what this machine compiles would be another object than the build's; empty where it is not."""
        tools = self.find(self.target, self.cache)
        return tools if isinstance(tools, str) else self.difference(tools)

    def difference(self, tools: compilers.Toolchain) -> str:
        """How a toolchain differs from the build's."""
        ours = tools.toolkit.version, tools.cxx_version
        for what, mine, theirs in zip(("nvcc", "C++ compiler"), ours, (self.nvcc, self.cxx), strict=True):
            if mine != theirs:
                return f"its {what} is {mine}, the build's is {theirs}"
        (unit,) = kernels.kernel_units(self.plan(tools, Path("/")))
        if unit.key != self.key:
            return f"its digest of compilers and flags is {unit.key}, the build's is {self.key}"
        return ""


@dataclass(frozen=True)
class Made:
    """An object, and what it took."""

    content: bytes
    seconds: float  # of CPU, by the compiler's processes
    memory: float  # bytes, of them together
    hits: int
    misses: int
    worker: str


def compile_kernel(order: Order, kernel: Kernel) -> Made:
    """Compile one kernel file.

    Raises:
        CompileError: the compiler failed, or this worker's toolchain has become another.
    """
    worker, key = get_worker(), thread_state.key
    tools = order.find(order.target, order.cache)
    if why := (tools if isinstance(tools, str) else order.difference(tools)):
        raise CompileError(f"worker {worker.name} can no longer compile {kernel.name}: {why}.")
    packed = admission.luggage_of(worker, order.plugin)
    assert not isinstance(tools, str) and packed  # noqa: PT018, S101 - for mypy
    folder = Path(worker.local_directory)
    plan = order.plan(tools, source_archive.unpacked(packed, folder), kernel)

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return task is not None and task.state in ("executing", "long-running")

    with tempfile.TemporaryDirectory(dir=folder, prefix="compile-") as place:
        return _compile(plan, Path(place), str(worker.name), wanted)


def _compile(plan: kernels.Plan, folder: Path, worker: str, wanted: Callable[[], bool]) -> Made:
    """Run the command that ninja would run."""
    (unit,) = kernels.kernel_units(plan)
    made, log = folder / f"{unit.target.stem}.o", folder / "log"
    launcher = f"{quoted([plan.toolchain.sccache or ''])} " if compile_cache.keeps(plan) else ""
    copy = ninja.staged(plan.tree.root / unit.source)
    command = kernels.command_of(plan, unit.rule).replace("$source", unit.source)
    # exec: what ends with this process is then the compiler, or the cache's client, and no shell.
    command = f"exec {launcher}{command.replace('$staged', quoted([copy]))} -o {quoted([made])}"
    spent = _Spent()
    with compile_cache.server(plan.toolchain, plan.build.parent, folder / "cache.log") as cache:
        environment = {**flags.environment(), **cache, "TERM": "dumb"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                tied(["sh", "-c", command]),
                cwd=plan.tree.root,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            _watch(process, cache.get("SCCACHE_SERVER_UDS", ""), wanted, spent)
        stats = compile_cache.stats(plan.toolchain, cache)
    if process.returncode != 0 or not made.is_file():
        raise CompileError(_failure(worker, unit.source, command, process.returncode, log))
    return Made(made.read_bytes(), spent.seconds, spent.memory, stats.hits, stats.misses, worker)


@dataclass
class _Spent:
    """What a compiler's processes were seen to take."""

    memory: float = 0.0  # the most, of all at one moment
    cpu: dict[tuple[int, float], float] = field(default_factory=dict)  # seconds, by process

    @property
    def seconds(self) -> float:
        """Of CPU, by all."""
        return sum(self.cpu.values())

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Take what they use now."""
        memory = 0
        for process in processes:
            with suppress(psutil.Error):
                used = process.cpu_times()
                self.cpu[process.pid, process.create_time()] = used.user + used.system
                memory += process.memory_info().rss
        self.memory = max(self.memory, float(memory))


def _watch(process: subprocess.Popen[bytes], socket: str, wanted: Callable[[], bool], spent: _Spent) -> None:
    """Wait for a compiler, and see what it takes; one that nobody wants any more ends."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PAUSE)
            return
        spent.look(_compilers(process.pid, socket))
        if not wanted():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _compilers(pid: int, socket: str) -> Iterator[psutil.Process]:
    """A compiler's processes; where a compile cache's server runs them, the server's children."""
    roots = [pid]
    with suppress(psutil.Error):
        for child in psutil.Process().children() if socket else ():
            with suppress(psutil.Error):
                if child.environ().get("SCCACHE_SERVER_UDS") == socket:
                    roots.append(child.pid)
    for root in dict.fromkeys(roots):
        with suppress(psutil.Error):
            yield psutil.Process(root)
            yield from psutil.Process(root).children(recursive=True)


def _failure(worker: str, source: str, command: str, status: int, log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    hint = ""
    if status < 0 or "Killed" in text or "out of memory" in text:
        hint = "\nThe compiler was ended: did the worker run out of memory? Start it with fewer --jobs."
    return f"{source} failed on worker {worker} with status {status}:\n  {command}\n{last_lines(text)}{hint}"

"""Compile through ninja and the compile cache, and tell how far it is.

No path of the clone reaches a compiler: commands run in the source tree with relative paths, and nvcc gets
kernel files at a place that follows from their content. So objects are the same wherever they are made, and
one clone's compiles answer another's.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ninja import ninja_syntax

from scripts.base import console, files, layout
from scripts.base.errors import CompileError
from scripts.base.process import interrupts_later, last_lines, quoted
from scripts.series.tree import Snapshot
from scripts.source import matrix
from scripts.wheels.compiling import compile_cache
from scripts.wheels.compiling.flags import environment
from scripts.wheels.compiling.kernels import Compilation, Unit, command_of, digest
from scripts.wheels.toolchain import compilers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TextIO

_PRIOR = 300  # seconds for which the above count when the time left is told


@dataclass(frozen=True)
class Compiled:
    """Objects, and how many compiler calls the cache answered."""

    objects: tuple[Path, ...]
    built: int
    seconds: float
    cache_hits: int
    cache_misses: int


def job_limit(asked: int | None, largest: float) -> tuple[int, str]:
    """How many compilers may run at once, and why: by the cores, and by the memory each may need."""
    if asked is not None:
        return asked, "--jobs"
    cores = len(os.sched_getaffinity(0))
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    available = int(re.findall(r"MemAvailable:\s+(\d+) kB", meminfo)[0]) * 1024
    by_memory = max(1, int(available // largest))
    return min(
        cores, by_memory
    ), f"{cores} cores, {available / 1e9:.0f} GB free for {largest / 1e9:.1f} GB a file"


def staged(source: Path) -> Path:
    """A copy of a kernel file at a path that follows from its content.

    nvcc hands a file's real path to each of its steps, and the compile cache takes it into the key.
    """
    text = source.read_text(encoding="utf-8")
    path = layout.cache("units") / hashlib.sha256(text.encode()).hexdigest()[:16] / source.name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another build may write the same, or another thread of a worker.
        part = path.with_name(f".{os.getpid()}-{threading.get_ident()}-{path.name}")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return path


Work = tuple[Compilation, "Sequence[Unit]"]

# An object is kept under the digest of its sources for good, so it may not be of sources that were edited
# meanwhile. By the time of change, which a file that is moved here or copied with its own time has as well.
_UNCHANGED = "changed=$$(find csrc -type f ! -name '.*' -cnewer {seen}) && test -z \"$$changed\""


def write_ninja(path: Path, work: Sequence[Work]) -> None:
    """The rules that make objects, as ninja reads them.

    It starts each plan's units in their order, side by side.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        writer = ninja_syntax.Writer(cast("Any", file), width=10**6)  # annotated as str, used as a file
        for at, (plan, units) in enumerate(work):
            launcher = f"{quoted([plan.toolchain.sccache])} " if plan.toolchain.sccache else ""
            kept = compile_cache.keeps(plan)
            seen = path.with_name(f"{path.name}.{at}.seen")
            seen.touch()
            os.utime(seen, ns=(plan.tree.seen, plan.tree.seen))
            for rule in sorted({unit.rule for unit in units}):
                # An object appears whole or not at all. A generator's object is not made again when its
                # command line changes: all that matters is in the folder's name, and with or without the
                # cache it is the same.
                cached = launcher if rule != "nvcc" or kept else ""
                compile_it = f"cd {quoted([plan.tree.root])} && {cached}{command_of(plan, rule)} -o $out.part"
                steps = f"{compile_it} && {_UNCHANGED.format(seen=quoted([seen]))} && mv $out.part $out"
                writer.rule(f"{rule}{at}", command=steps, description="$source", generator=True)
        placed = [(place, at, unit) for at, (_, units) in enumerate(work) for place, unit in enumerate(units)]
        made: set[Path] = set()
        for _, at, unit in sorted(placed, key=lambda entry: entry[:2]):
            if unit.target in made:  # plans that do not differ in what it depends on
                continue
            made.add(unit.target)
            # The tree's content is in the folder's name, so no dependency file is needed.
            copy = staged(work[at][0].tree.root / unit.source) if unit.rule == "nvcc" else unit.source
            writer.build(
                [str(unit.target)],
                f"{unit.rule}{at}",
                variables={"source": unit.source, "staged": quoted([copy])},
            )


@contextmanager
def running_ninja(
    command: list[str], env: dict[str, str], log: Path, units: Sequence[Unit] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A ninja run in a process group of its own: Ctrl-C reaches it through us alone, once.

    However the block is left, ninja and its compilers have ended and nothing half-written is left.
    """
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ {quoted(command)}\n")
    with interrupts_later() as interrupts_now:
        process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with process:
            try:
                interrupts_now()
                yield process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)  # SIGINT may be ignored by what runs below it
                    process.wait()
                for unit in units:
                    unit.target.with_name(unit.target.name + ".part").unlink(missing_ok=True)


def compile_alone(root: Path, path: str) -> Path:
    """Compile one file of a tree as the default target does; its object."""
    target = matrix.load(layout.MATRIX).default()
    rule = "nvcc" if path.endswith(".cu") else "cxx"
    tools = compilers.assemble(
        target, compilers.running_python() if rule == "cxx" else None, layout.BUILD, cache=True
    )
    compilation = Compilation(
        Snapshot(root), tools, target.kernels, target.architectures, root.parent / "build"
    )
    unit = Unit(path, compilation.build / "guard.o", rule, 200, 6.5e9)
    return compile_units(compilation, [unit], 1).objects[0]


def compile_units(plan: Compilation, units: Sequence[Unit], jobs: int | None) -> Compiled:
    """Compile what is not there yet; see :func:`compile_together`."""
    return compile_together([(plan, units)], jobs)


def compile_together(work: Sequence[Work], jobs: int | None) -> Compiled:
    """Compile what is not there yet of several plans, whose toolchain and build folder are one.

    Returns:
        The objects, plan after plan, each in the order of its units; one that several plans have is there
        once.

    Raises:
        CompileError: with the failed command, the end of its output, and where the whole log is.
        SeriesError: sources changed meanwhile.
        KeyboardInterrupt: after the compilers were stopped; what was finished stays for the next run.
    """
    with files.in_turn(work[0][0].build / "compile.lock", "compiles in this clone"):
        return _compile_together(work, jobs)


@dataclass
class _Pace:
    """How far a compile is, and the seconds that are left."""

    seconds_left: float  # of CPU, as files were seen to take them
    limit: int
    seconds_done: float = 0.0
    finished: int = 0
    started: float = field(default_factory=time.monotonic)

    def finish(self, unit: Unit) -> float:
        """Count a file as compiled; the seconds left."""
        self.finished += 1
        self.seconds_done += unit.seconds
        self.seconds_left -= unit.seconds
        # Before much is done the rate is what the files were seen to take, one job a core.
        elapsed = time.monotonic() - self.started
        return self.seconds_left * (elapsed + _PRIOR) / (self.seconds_done + _PRIOR * self.limit)


def _compile_together(work: Sequence[Work], jobs: int | None) -> Compiled:
    plan, units = work[0][0], list({unit.target: unit for _, some in work for unit in some}.values())
    toolchain = plan.toolchain
    objects = tuple(unit.target for unit in units)
    for unit in units:
        unit.target.parent.mkdir(parents=True, exist_ok=True)
    logs = plan.build / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    stamp = digest([str(o) for o in objects])
    ninja_file, log = plan.build / "ninja" / stamp / "build.ninja", logs / f"compile-{stamp}.log"
    write_ninja(ninja_file, work)
    limit, reason = job_limit(jobs, max(unit.memory for unit in units))
    pending = [unit for unit in units if not unit.target.exists()]
    began = time.time()
    if pending:
        console.note(
            f"{len(pending)} of {len(units)} files to compile, {limit} at once ({reason}); log: {log}"
        )
    pace = _Pace(sum(unit.seconds for unit in pending), limit)
    command = [str(toolchain.ninja), "-C", str(ninja_file.parent), f"-j{limit}"]
    tail: list[str] = []
    with (
        compile_cache.server(toolchain, plan.build.parent, logs / f"cache-{stamp}.log") as cache,
        console.progress("compiling", len(units), len(units) - len(pending)) as advance,
    ):
        env = {**environment(), **cache, "NINJA_STATUS": "[%f/%t] ", "TERM": "dumb"}
        with running_ninja(command, env, log, units) as ninja, log.open("a", encoding="utf-8") as record:
            for unit in _finished(ninja.stdout or (), units, record, tail):
                advance(Path(unit.source).name, pace.finish(unit))
            status = ninja.wait()
        stats = compile_cache.stats(toolchain, cache) if status == 0 else compile_cache.Stats()
    if status != 0:
        for compilation, _ in work:
            compilation.tree.check_unchanged()
        raise CompileError(_failure(tail, log, status))
    if pending and all(compile_cache.keeps(compilation) for compilation, _ in work):
        compile_cache.check(stats, toolchain, pending, began)
    return Compiled(objects, pace.finished, time.monotonic() - pace.started, stats.hits, stats.misses)


def _finished(
    output: Iterable[str], units: Sequence[Unit], record: TextIO, tail: list[str]
) -> Iterator[Unit]:
    """The units that ninja says it compiled, one by one.

    All that it says goes into ``record`` and ``tail``.
    """
    by_source = defaultdict(list)  # of several plans, a file may be there several times
    for unit in units:
        by_source[unit.source].append(unit)
    for line in output:
        record.write(line)
        tail.append(line.rstrip("\n"))
        match = re.match(r"\[\d+/\d+\] (.+)$", line)
        if match and by_source[match[1]]:
            yield by_source[match[1]].pop()


def _failure(lines: list[str], log: Path, status: int) -> str:
    """The first failed command and the end of what it said."""
    at = next((i for i, line in enumerate(lines) if line.startswith("FAILED:")), None)
    if at is None:
        return f"ninja exited with {status}.\n{last_lines(chr(10).join(lines))}\nThe full log is {log}."
    command = lines[at + 1] if at + 1 < len(lines) else ""
    output = []
    for line in lines[at + 2 :]:
        if re.match(r"\[\d+/\d+\] |ninja: |FAILED:", line):
            break
        output.append(line)
    text = "\n".join(output)
    hint = (
        "An error in a patched header shows here first: "
        "look at the line above, in the patch that touches the file."
    )
    if re.search(r"Killed|Cannot allocate memory|out of memory|signal 9", text):
        hint = "The compiler ran out of memory: try fewer at once (--jobs 1)."
    elif "No space left" in text:
        hint = "The disk is full: free some space and run the same command again; what was compiled is kept."
    failed = lines[at].removeprefix("FAILED: ").strip()
    return f"{failed} failed:\n  {command}\n{last_lines(text)}\nThe full log is {log}. {hint}"

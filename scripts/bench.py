"""Measure what the build system saves, beside upstream's own ``setup.py`` on the same machine and the same kernel files.

CPU seconds are those of the processes that ninja started, without a compile cache. Upstream's ``setup.py`` compiles all
kernel files or none; it writes its commands for ninja, of which those for the chosen files are run.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
import zlib
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts import build, console, kernels, maintain, matrix, speed, toolchain, tree, upstream, wheel
from scripts.errors import CompileError, UsageError
from scripts.git import Repository
from scripts.process import last_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_KERNELS = "hdim64,fp16"  # of each pass a file, causal and not
_WHEELS = 16  # of a matrix of four torches and four Pythons
_ARCHITECTURES = ("80", "90", "100", "120")  # that upstream's setup.py can be asked for


@dataclass(frozen=True)
class Spent:
    """What a step took."""

    cpu_seconds: float
    seconds: float


@dataclass(frozen=True)
class Side:
    """One of the two builds: its kernel files, its binding, and what they make, stripped and deflated as in a wheel."""

    kernels: Spent
    binding: Spent
    deflated_bytes: int


@dataclass(frozen=True)
class Line:
    """One figure beside its goal."""

    what: str
    ours: str
    upstream: str
    value: float
    goal: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether the goal is."""
        return self.value <= self.goal


@contextmanager
def _spending(into: list[Spent]) -> Iterator[None]:
    """Append what the block's child processes took."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before, started = cpu(), time.monotonic()
    yield
    into.append(Spent(cpu() - before, time.monotonic() - started))


@dataclass(frozen=True)
class Ours:
    """What this build system's side took.

    Attributes:
        side: what upstream's is held against.
        without_bias: the same kernel files without attn_mask and attn_bias; None where that was the choice.
        further: one more wheel from the same kernel objects.
        again: a build with nothing changed.
        recompiled: kernel files that a change of ``flash_api.cpp`` compiles again.
        share: of the kernel files, those that the further wheel compiled again.
    """

    side: Side
    without_bias: Spent | None
    further: Spent
    again: Spent
    recompiled: int
    share: float


def lines(taken: Ours, theirs: Side) -> list[Line]:
    """The figures, each beside its goal: ratios to upstream's side or to ours without masks and biases, and seconds."""
    ours, without, share = taken.side, taken.without_bias, taken.share
    one, other = ours.kernels.cpu_seconds, theirs.kernels.cpu_seconds
    bindings = tuple(_WHEELS * side.binding.cpu_seconds for side in (ours, theirs))
    return [
        Line("nvcc, these kernel files", f"{one:.0f} CPU s", f"{other:.0f} CPU s", one / other, 0.6, "×"),
        Line(
            f"nvcc, {_WHEELS} wheels of one CUDA (and g++)",
            f"{one * (1 + (_WHEELS - 1) * share):.0f} (and {bindings[0]:.0f}) CPU s",
            f"{_WHEELS * other:.0f} (and {bindings[1]:.0f}) CPU s",
            1 + (_WHEELS - 1) * share,
            1.1,
            "× one's",
        ),
        *(
            [Line("nvcc, for masks and biases", f"{one:.0f} CPU s, {without.cpu_seconds:.0f} without", "", one / without.cpu_seconds, 1.25, "×")]
            if without
            else []
        ),
        Line("a further torch or Python, installed", f"{taken.further.seconds:.0f} s", "", taken.further.seconds, 90, "s"),
        Line("nothing changed", f"{taken.again.seconds:.1f} s", "", taken.again.seconds, 5, "s"),
        Line("flash_api.cpp changed: kernel files compiled", str(taken.recompiled), "", taken.recompiled, 0, ""),
        Line(
            "extension, deflated",
            f"{ours.deflated_bytes / 1e6:.2f} MB",
            f"{theirs.deflated_bytes / 1e6:.2f} MB",
            ours.deflated_bytes / theirs.deflated_bytes,
            0.8,
            "×",
        ),
    ]


def _deflated(extension: Path) -> int:
    return len(zlib.compress(extension.read_bytes()))


def _recompiled(plan: kernels.Plan) -> int:
    """How many kernel files would be compiled again after a change of ``flash_api.cpp``, made as a commit."""
    root = plan.tree.root
    repository = Repository(root, CompileError)
    with (root / "csrc/flash_attn/flash_api.cpp").open("a", encoding="utf-8") as file:
        file.write("// a change\n")
    repository.run("commit", "--quiet", "--all", "--message", "A change of the binding")
    sources, kernel_sources = tree.sources(repository)
    changed = replace(plan, tree=replace(plan.tree, sources=sources, kernel_sources=kernel_sources))
    if kernels.binding_unit(changed).target.exists():
        raise CompileError("a change of flash_api.cpp is not seen: the binding's object is taken for another's.")
    return sum(not unit.target.exists() for unit in kernels.kernel_units(changed))


def _without_bias(plan: kernels.Plan, jobs: int | None) -> Spent | None:
    """What the kernel files take without attn_mask and attn_bias; None where they are without them."""
    bare = replace(plan, kernels=tuple(replace(kernel, bias=False) for kernel in plan.kernels))
    if bare == plan:
        return None
    spent: list[Spent] = []
    console.step("The same without attn_mask and attn_bias")
    with _spending(spent):
        kernels.compile_units(bare, kernels.kernel_units(bare), jobs)
    return spent[0]


def _ours(loaded: matrix.Matrix, job: build.Job, options: argparse.Namespace, folder: Path) -> tuple[Ours, kernels.Plan]:
    spent: list[Spent] = []
    built: list[build.Built] = []
    console.step("This build system, without the compile cache")
    _, applied = maintain.apply(loaded, options.source, folder / "source")
    tools = toolchain.assemble(job.target, job.python, maintain.BUILD, cache=False)
    plan = kernels.Plan(applied, tools, job.kernels, job.architectures, folder, shared_ptx=loaded.shared_ptx)
    with _spending(spent):
        made = kernels.compile_units(plan, kernels.kernel_units(plan), options.jobs)
    with _spending(spent):
        binding = kernels.compile_units(plan, [kernels.binding_unit(plan)], options.jobs)
    extension = folder / "ours.so"
    wheel.link(tools, [*binding.objects, *made.objects], extension, folder / "logs" / "link.log")
    binding.objects[0].unlink()
    one = argparse.Namespace(stock=False, source=options.source, jobs=options.jobs)
    place = build.Place(folder, folder / "dist", cache=False)
    for _ in range(2):  # a further torch or Python: its binding, link and wheel; then nothing changed
        with _spending(spent):
            built.append(build.build_one(loaded, job, one, place))
    share = (built[0].compiled.built - 1) / len(job.kernels)  # but for the binding
    without = _without_bias(plan, options.jobs)
    return Ours(Side(spent[0], spent[1], _deflated(extension)), without, spent[2], spent[3], _recompiled(plan), share), plan


def _libraries(env: toolchain.Environment) -> dict[str, str]:
    """The variable that shows compilers the headers of CUDA's libraries, which a bare toolkit lacks."""
    return {"CPATH": os.pathsep.join(str(folder / "include") for folder in env.cuda)}


def _setup(source: Path, plan: kernels.Plan, log: Path) -> Path:
    """Have upstream's ``setup.py`` write its ninja file, and keep it from running it; the file."""
    env = plan.toolchain.environment
    with tempfile.TemporaryDirectory() as name:
        stand_in = Path(name) / "ninja"
        stand_in.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {plan.toolchain.ninja} --version\nexit 1\n', encoding="utf-8")
        stand_in.chmod(0o755)
        settings = {
            "PATH": f"{name}{os.pathsep}{os.environ['PATH']}",
            "CUDA_HOME": str(plan.toolchain.toolkit.nvcc.parent.parent),
            **_libraries(env),
            "FLASH_ATTENTION_FORCE_BUILD": "TRUE",
            "FLASH_ATTN_CUDA_ARCHS": ";".join(plan.architectures),
            "NVCC_THREADS": "1",
            "MAX_JOBS": "1",
        }
        command = [str(env.python), "setup.py", "build_ext"]
        done = subprocess.run(command, cwd=source, env={**os.environ, **settings}, capture_output=True, text=True, errors="replace", check=False)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    found = sorted(source.glob("build/temp.*/build.ninja"))
    if not found:
        raise CompileError(f"upstream's setup.py wrote no ninja file:\n{last_lines(done.stderr)}\nThe full log is {log}.")
    return found[0]


def _run_ninja(plan: kernels.Plan, file: Path, targets: Sequence[str], jobs: int, log: Path) -> None:
    """Make some targets of a ninja file, with a bar."""
    settings = {**os.environ, "NINJA_STATUS": "[%f/%t] ", **_libraries(plan.toolchain.environment)}
    command = [str(plan.toolchain.ninja), "-C", str(file.parent), f"-j{jobs}", *targets]
    started, said = time.monotonic(), ""
    with console.progress() as progress:
        bar = progress.add_task("compiling upstream's", total=len(targets))
        with kernels.running_ninja(command, settings, log) as ninja, log.open("a", encoding="utf-8") as record:
            for line in ninja.stdout or ():
                record.write(line)
                said = (said + line)[-4000:]
                if counted := re.match(r"\[(\d+)/", line):
                    made = int(counted[1])
                    progress.update(bar, completed=made, seconds_left=(time.monotonic() - started) / made * (len(targets) - made))
            status = ninja.wait()
    if status != 0:
        raise CompileError(f"upstream's own build failed:\n{last_lines(said)}\nThe full log is {log}.")


def _theirs(loaded: matrix.Matrix, plan: kernels.Plan, options: argparse.Namespace, folder: Path) -> Side:
    console.step("Upstream's setup.py")
    source, logs = folder / "upstream", folder / "logs"
    upstream.materialise(maintain.find(loaded, options.source), source)
    file = _setup(source, plan, logs / "setup.log")
    objects = re.findall(r"^build (\S+\.o):", file.read_text(encoding="utf-8"), re.MULTILINE)
    units = kernels.kernel_units(plan)
    wanted = {Path(unit.source).stem for unit in units}
    chosen = [name for name in objects if Path(name).stem in wanted]
    binding = [name for name in objects if Path(name).stem == "flash_api"]
    if len(chosen) != len(wanted) or len(binding) != 1:
        raise CompileError(f"upstream's setup.py would make {len(chosen)} of {len(wanted)} kernel objects and {len(binding)} bindings; see {file}.")
    jobs, reason = kernels.job_limit(options.jobs, max(unit.memory for unit in units))
    console.note(f"{len(chosen)} of its {len(objects)} files, {jobs} at once ({reason})")
    spent: list[Spent] = []
    for targets in (chosen, binding):
        with _spending(spent):
            _run_ninja(plan, file, targets, jobs, logs / "upstream.log")
    extension = folder / "upstream.so"
    wheel.link(plan.toolchain, [Path(name) for name in (*binding, *chosen)], extension, logs / "link.log")
    return Side(spent[0], spent[1], _deflated(extension))


def _show(found: Sequence[Line]) -> None:
    table = Table("what", "ours", "upstream's setup.py", "figure", "goal", "")
    for line in found:
        figure, goal = (f"{number:.2f} {line.unit}" if "×" in line.unit else f"{number:.0f} {line.unit}" for number in (line.value, line.goal))
        table.add_row(line.what, line.ours, line.upstream, figure, f"at most {goal}", "met" if line.met else "missed")
    console.out.print(table)


def _run(options: argparse.Namespace) -> None:
    if options.what == "kernels":
        speed.run(options)
        return
    if options.figures or options.picture:
        raise UsageError("--from and --picture are for bench -- kernels.")
    _bench_build(options)


def _bench_build(options: argparse.Namespace) -> None:
    loaded = maintain.load()
    target = loaded.named(options.target) if options.target else loaded.default()
    if unknown := [a for a in target.architectures if a not in _ARCHITECTURES]:
        raise UsageError(f"upstream's setup.py knows no compute capability {', '.join(unknown)}; it has {', '.join(_ARCHITECTURES)}.")
    wanted = options.kernels or matrix.parse_kernels(_KERNELS)
    job = build.Job(target, toolchain.check_python(target, options.python), wanted, target.architectures)
    folder = maintain.BUILD / "bench"
    shutil.rmtree(folder, ignore_errors=True)
    ours, plan = _ours(loaded, job, options, folder)
    theirs = _theirs(loaded, plan, options, folder)
    found = lines(ours, theirs)
    if options.json:
        facts: dict[str, Any] = {"target": target.name, "python": job.python, "kernels": [k.name for k in job.kernels]}
        console.result(
            facts | {"ours": asdict(ours.side), "upstream": asdict(theirs), "figures": [asdict(line) | {"met": line.met} for line in found]}
        )
    _show(found)
    shutil.rmtree(folder)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".svg", ".png") or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no name for a picture in a folder that exists (FILE.svg or FILE.png)")
    return path


def add_command(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = commands.add_parser(
        "bench",
        help="measure the kernels on a GPU, or the build, beside upstream's",
        description="kernels: build the wheel and upstream's kernels of the same pin, time both in one process on this machine's GPU, and "
        "hold the figures against the goals. build: compile the same kernel files as this build system does and as upstream's setup.py "
        "does, without a compile cache, and compare.",
    )
    parser.add_argument("what", choices=["kernels", "build"], nargs="?", default="kernels", help="what to measure (default: kernels)")
    parser.add_argument(
        "--kernels",
        metavar="SET",
        type=build.kernel_choice,
        help=f"which kernel files (default: {speed.KERNELS}, or {_KERNELS} for build; see nox -s build -- --help)",
    )
    parser.add_argument("--from", dest="figures", metavar="FILE", type=Path, help="kernels: measure nothing; take what tests/wheel/bench.py wrote")
    parser.add_argument("--picture", metavar="FILE.svg", type=_picture, help="kernels: draw time and memory over the length of sequences")
    parser.add_argument("--target", metavar="NAME", help="the target (default: the one marked in wheel_matrix.toml)")
    parser.add_argument("--python", metavar="X.Y", help="the Python (default: the one running this)")
    parser.add_argument("--jobs", metavar="N", type=build.positive, help="compilers at once (default: by cores and memory)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    maintain.add_source(parser)
    parser.set_defaults(run=_run, interrupted="interrupted; the next run starts anew.")

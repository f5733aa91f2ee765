"""Measure what the build system saves, beside upstream's ``setup.py`` with the same machine and files.

CPU seconds are those of the processes that ninja started, without a compile cache. A kernel file is compiled
by both sides, one right after the other: a machine that is slower for a while is slower for both. Upstream's
``setup.py`` compiles all kernel files or none; it writes its commands for ninja, of which those for the
chosen files are run.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console, layout
from scripts.base.errors import CompileError
from scripts.base.git import Repository
from scripts.base.process import last_lines
from scripts.lab import metering
from scripts.lab.build_figures import Ours, Side, Spent
from scripts.series import clone, tree
from scripts.source import matrix, upstream
from scripts.wheels.building import build
from scripts.wheels.compiling import flags, kernels, ninja
from scripts.wheels.packing import linking
from scripts.wheels.packing.linking import Product

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scripts.source.matrix_tables import Upstream
    from scripts.wheels.building.jobs import Job
    from scripts.wheels.toolchain import compilers, torch_environment

KERNELS = "hdim64,fp16"  # of each pass a file, causal and not
ARCHITECTURES = ("80", "90", "100", "120")  # that upstream's setup.py can be asked for
_THEIRS = 1.7  # how much longer upstream's files take, for the time left


@contextmanager
def _spending(into: list[Spent]) -> Iterator[None]:
    """Append what the block's child processes took."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before, started = cpu(), time.monotonic()
    yield
    into.append(Spent(cpu() - before, time.monotonic() - started))


def _deflated(extension: Path) -> int:
    return len(zlib.compress(extension.read_bytes()))


def _recompiled(plan: kernels.Plan) -> int:
    """How many kernel files would be compiled again after a change of the core.

    The change is made as a commit and taken back.
    """
    root = plan.tree.root
    repository = Repository(root, CompileError)
    before = repository.resolve("HEAD")
    try:
        with (root / kernels.CORE / "binding.cpp").open("a", encoding="utf-8") as file:
            file.write("// a change\n")
        repository.run("commit", "--quiet", "--all", "--message", "A change of the binding")
        sources, kernel_sources = tree.sources(repository)
        changed = replace(plan, tree=replace(plan.tree, sources=sources, kernel_sources=kernel_sources))
        if kernels.binding_units(changed)[0].target.exists():
            raise CompileError("a change of the core is not seen: its objects are taken for another's.")
        return sum(not unit.target.exists() for unit in kernels.kernel_units(changed))
    finally:
        repository.run("reset", "--quiet", "--hard", before)


def _libraries(env: torch_environment.Environment) -> dict[str, str]:
    """The variable that shows compilers the headers of CUDA's libraries, which a bare toolkit lacks."""
    return {"CPATH": os.pathsep.join(str(folder / "include") for folder in env.cuda)}


def _setup(source: Path, plan: kernels.Plan, log: Path) -> Path:
    """Have upstream's ``setup.py`` write its ninja file, and keep it from running it; the file."""
    env = plan.toolchain.environment
    with tempfile.TemporaryDirectory() as name:
        stand_in = Path(name) / "ninja"
        stand_in.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && exec {plan.toolchain.ninja} --version\nexit 1\n',
            encoding="utf-8",
        )
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
        done = subprocess.run(
            command,
            cwd=source,
            env={**flags.environment(), **settings},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    ninja_files = sorted(source.glob("build/temp.*/build.ninja"))
    if not ninja_files:
        raise CompileError(
            f"upstream's setup.py wrote no ninja file:\n{last_lines(done.stderr)}\nThe full log is {log}."
        )
    return ninja_files[0]


def _upstreams(
    plan: kernels.Plan,
    units: Sequence[kernels.Unit],
    release: tuple[Upstream, upstream.Checkout],
    source: Path,
) -> tuple[list[metering.Compile], metering.Compile]:
    """Upstream's compiles of the same kernel files, in their order, and of its binding."""
    there = sorted(source.glob("build/temp.*/build.ninja"))
    if not there:
        console.step("Upstream's setup.py")
        upstream.materialise(*release, source)
    file = there[0] if there else _setup(source, plan, plan.build / "logs" / "setup.log")
    objects = re.findall(r"^build (\S+\.o):", file.read_text(encoding="utf-8"), re.MULTILINE)
    by_stem = {Path(name).stem: Path(name) for name in objects}
    stems = [Path(unit.source).stem for unit in units]
    if missing := [stem for stem in (*stems, "flash_api") if stem not in by_stem]:
        raise CompileError(f"upstream's setup.py would not make {', '.join(missing)}; see {file}.")
    console.note(f"upstream's setup.py: {len(stems)} of its {len(objects)} files, and the binding")
    targets = [by_stem[stem] for stem in (*stems, "flash_api")]
    seconds = [_THEIRS * unit.seconds for unit in units] + [40.0]
    *compiles, binding = (
        metering.Compile("upstream", target.stem, command, target, taken)
        for target, command, taken in zip(
            targets,
            metering.commands_of(plan, file, targets, _libraries(plan.toolchain.environment)),
            seconds,
            strict=True,
        )
    )
    return compiles, binding


def folder_of(loaded: matrix.Matrix, job: Job, tools: compilers.Toolchain) -> Path:
    """Where one choice is measured, so that the same command goes on after an interruption."""
    parts = (
        job,
        loaded.upstream,
        tools.toolkit,
        tools.cxx,
        tools.cxx_version,
        tools.environment.torch,
        tools.environment.site,
    )
    return layout.BUILD / "bench" / hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _SideCompiles:
    """What one side compiles."""

    name: str  # ours or upstream
    kernels: list[metering.Compile]
    binding: list[metering.Compile]


def _without_bias(plan: kernels.Plan) -> list[metering.Compile]:
    """Our compiles of the same files without masks and biases; none where the plan's are without them."""
    without = replace(plan, kernels=tuple(replace(kernel, bias=False) for kernel in plan.kernels))
    return (
        metering.compiles_of(without, "without-bias", kernels.kernel_units(without))
        if without != plan
        else []
    )


def _side(compiled: _SideCompiles, tools: compilers.Toolchain, folder: Path) -> Side:
    """The figures of a side whose files were compiled; links what a wheel of it has."""
    objects = [unit.target for unit in (*compiled.binding, *compiled.kernels)]
    log, first = folder / "logs" / "link.log", folder / f"{compiled.name}.so"
    linked = [first]
    if compiled.name == "ours":
        binding = [path for path in objects if path.stem == Path(kernels.BINDING).stem]
        rest = [path for path in objects if path not in binding]
        linked.append(folder / "ours-binding.so")
        linking.link(tools, rest, first, log, Product.LIBRARY)
        linking.link(tools, [*binding, first], linked[1], log, Product.BINDING)
    else:
        linking.link(tools, objects, first, log, Product.STOCK)
    return Side(
        metering.metered_seconds(folder, compiled.kernels),
        sum(metering.metered_seconds(folder, compiled.binding).values()),
        sum(map(_deflated, linked)),
    )


def compare(
    loaded: matrix.Matrix,
    job: Job,
    tools: compilers.Toolchain,
    options: build.BuildOptions,
    folder: Path,
) -> tuple[Ours, Side]:
    """Both sides' figures."""
    _, applied = clone.apply(loaded, options.source, folder / "source", reset=True)  # nobody's work is there
    plan = kernels.Plan(applied, tools, job.kernels, job.architectures, folder, shared_ptx=loaded.shared_ptx)
    units, binding = kernels.kernel_units(plan), kernels.binding_units(plan)
    our_kernels = metering.compiles_of(plan, "ours", units)
    ours = _SideCompiles("ours", our_kernels, metering.compiles_of(plan, "ours", binding))
    checkout = upstream.pinned(loaded.upstream, options.source)
    their_kernels, theirs = _upstreams(plan, units, (loaded.upstream, checkout), folder / "upstream")
    upstreams = _SideCompiles("upstream", their_kernels, [theirs])
    without_bias = _without_bias(plan)
    jobs, reason = ninja.job_limit(options.jobs, max(u.memory for u in units))
    addition = ", and ours without masks and biases" if without_bias else ""
    console.step(f"{len(units)} kernel files on both sides{addition}, without the compile cache")
    console.note(f"{jobs} at once ({reason})")
    sides = [ours.kernels, upstreams.kernels, *([without_bias] if without_bias else [])]
    compiles = [*metering.side_by_side(sides), *ours.binding, *upstreams.binding]
    metering.meter(plan, compiles, jobs, folder)
    our_side, upstreams_side = (_side(compiled, tools, folder) for compiled in (ours, upstreams))
    for begun in {*(unit.target.parent for unit in binding), folder / "linked", folder / "dist"}:
        shutil.rmtree(begun, ignore_errors=True)
    spent: list[Spent] = []
    built: list[build.Built] = []
    place = build.Place(folder, folder / "dist", cache=False)
    for _ in range(2):  # a further choice of kernels: its core, link and wheel; then nothing changed
        with _spending(spent):
            built.append(build.build_one(loaded, job, options, place))
    share = (built[0].compiled.built - len(binding)) / len(job.kernels)  # but for the core
    seconds_without = metering.metered_seconds(folder, without_bias) if without_bias else None
    further, again = spent
    return Ours(our_side, seconds_without, further, again, _recompiled(plan), share), upstreams_side

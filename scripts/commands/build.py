"""``build``: build wheels into dist/."""

from __future__ import annotations

import shutil
from itertools import product
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts.base import console, layout
from scripts.base.errors import BuildError
from scripts.commands import arguments, build_checks, build_python, on_workers
from scripts.commands.matrix import list_targets
from scripts.source.kernel_set import DTYPES, HEAD_DIMS, Pass
from scripts.wheels.building import build
from scripts.wheels.building.build import BuildOptions, Built, Place
from scripts.wheels.building.jobs import Choice, Job, chosen
from scripts.wheels.compiling import kernels
from scripts.wheels.packing import cpp_archive
from scripts.wheels.proof import machine_gpus
from scripts.wheels.toolchain import compilers

if TYPE_CHECKING:
    import argparse

    from scripts.source import matrix
    from scripts.source.kernel_set import Kernel


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(
        commands,
        "build",
        "An interrupted build goes on where it stopped.",
    )
    arguments.add_upstream(parser)
    _add_choice(parser)
    arguments.add_jobs(parser, action=arguments.Once)
    arguments.add_scheduler(parser, "compile the kernel files")
    arguments.add_source(parser)
    parser.add_argument("--no-cache", action="store_true", help="do without the compile cache")
    _add_result(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and stop")
    parser.set_defaults(
        run=_run, interrupted="interrupted. What was finished is kept: the same command goes on from there."
    )


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """Options that say which wheels."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--target",
        action=arguments.Once,
        metavar="NAME",
        help="the target to build, or a glob such as 'cu12*' (default: the one marked in wheel_matrix.toml)",
    )
    which.add_argument("--all", action="store_true", help="build every target")
    which.add_argument("--list", action="store_true", help="list the targets and stop")
    parser.add_argument(
        "--kernels",
        action=arguments.Once,
        metavar="SET",
        type=arguments.kernel_choice,
        help="'all', or some of hdim64,…,fp16,bf16,fwd,split,bwd,causal,full; "
        "'no-bias' leaves attn_mask and attn_bias out (default: the target's)",
    )
    parser.add_argument(
        "--arch",
        action=arguments.Once,
        metavar="CC,…",
        type=arguments.architectures,
        help="compute capabilities, such as 80,90 (default: the target's)",
    )
    parser.add_argument(
        "--base-version",
        action=arguments.Once,
        metavar="VERSION",
        help="give the wheel an earlier release's version, for consumers that pin one; its label and "
        "provenance say what it is",
    )


def _add_result(parser: argparse.ArgumentParser) -> None:
    """Options that say what is made, in what, and where it goes."""
    parser.add_argument(
        "--stock",
        action="store_true",
        help="build unpatched kernels as a bare extension, to measure against (tests/wheel/bench.py)",
    )
    parser.add_argument(
        "--python",
        action=arguments.Once,
        metavar="X.Y",
        type=arguments.python,
        help="with --stock: the Python that it is for (default: the one running this)",
    )
    parser.add_argument(
        "--cpp",
        action="store_true",
        help="make the archive of the C++ API (headers, library, CMake's files) in the place of a wheel",
    )
    parser.add_argument(
        "--kernels-only",
        action="store_true",
        help="compile the kernel files and stop; a wheel takes them from there",
    )
    parser.add_argument(
        "--containers",
        action="store_true",
        help="build through cibuildwheel, in a container per target: manylinux wheels",
    )
    parser.add_argument(
        "--image",
        action=arguments.Once,
        metavar="NAME",
        help="with --containers: the image (default: [images] of wheel_matrix.toml)",
    )
    parser.add_argument(
        "--out",
        action=arguments.Once,
        metavar="DIR",
        type=arguments.folder,
        default=layout.DIST,
        help="where wheels go (default: dist/)",
    )
    parser.add_argument(
        "--check-reproducible",
        action="store_true",
        help="build each once more, from nothing and elsewhere, and compare byte for byte",
    )
    arguments.add_sign(parser, "how each wheel was built")


def _run(options: argparse.Namespace) -> None:
    loaded = _chosen(options)
    if loaded.table.kind == "python":
        build_python.run(loaded, options)
        return
    if options.list:
        list_targets(loaded)
        return
    jobs = chosen(
        loaded,
        Choice(options.target, options.all, options.kernels or (), options.arch or ()),
    )
    build_checks.check(loaded, jobs, options)
    if options.dry_run or len(jobs) > 1:
        _plan(loaded, jobs, options)
    if not options.arch and (told := _unserved(jobs)):
        console.warn(told)
    if options.dry_run:
        if options.scheduler:
            on_workers.plan(
                loaded, jobs, Place(layout.BUILD, options.out, not options.no_cache), options.scheduler
            )
        _list_kernels({kernel for job in jobs for kernel in job.kernels})
        return
    _build(loaded, jobs, options)


def _chosen(options: argparse.Namespace) -> matrix.Matrix:
    """The matrix as an upstream sees it: the one that is named, or that a named target belongs to."""
    loaded = arguments.chosen(options)
    owners = {target.name: target.upstream for target in loaded.all_targets}
    if options.upstream is None:
        loaded = loaded.of(owners.get(options.target, loaded.name))
    return loaded if options.base_version is None else loaded.passing_for(options.base_version)


def _build(loaded: matrix.Matrix, jobs: list[Job], options: argparse.Namespace) -> None:
    """Build what was chosen, and exit with the status of the first failure."""
    free = shutil.disk_usage(layout.ROOT).free
    if free < 4e9:
        console.warn(f"{free / 1e9:.0f} GB are free here; a first build takes about 3 GB.")
    how = BuildOptions(options.source, options.jobs, options.stock, options.cpp, options.python, options.sign)
    place = Place(layout.BUILD, options.out.resolve(), not options.no_cache)
    failed: list[BuildError] = []
    if options.scheduler:
        without = on_workers.compile_for(loaded, jobs, how, place, options.scheduler)
        jobs, failed = [job for job in jobs if job not in without], [*without.values()]
    if options.kernels_only:
        for job in {(j.target.cuda, j.target.toolkit, j.kernels, j.architectures): j for j in jobs}.values():
            build.kernels_only(loaded, job, how, place)
    elif options.containers:
        failed = build.in_containers(loaded, jobs, how, place, options.image)
    else:
        results = build.build_all(loaded, jobs, how, place, check_reproducible=options.check_reproducible)
        if len(jobs) > 1:
            _summary(jobs, results)
        failed += [result for result in results if isinstance(result, BuildError)]
    if failed:
        raise SystemExit(failed[0].exit_code)
    if not (options.stock or options.cpp or options.containers or options.kernels_only):
        console.note("next: nox -s verify, on a machine with a GPU")


def _plan(loaded: matrix.Matrix, jobs: list[Job], options: argparse.Namespace) -> None:
    """Say what builds will take, before the first.

    Kernels serve every target of one toolkit.
    """
    table = Table(
        "target",
        "makes",
        "kernel files",
        "there by then",
        "to compile",
        "arch",
        "CPU time, nothing cached",
    )
    seen: dict[tuple[str, tuple[str, ...]], set[Kernel]] = {}
    for job in jobs:
        key = (job.target.cuda, job.architectures)
        there = set() if options.stock else seen.get(key, set()) | build.made(loaded, job)
        fresh = set(job.kernels) - there
        seen[key] = there | fresh
        compiles = f"{len(fresh)} and the binding" if fresh else "the binding"
        if not options.containers and compilers.out_of_reach(job.target):
            compiles += f"; needs CUDA {job.target.cuda} or --containers"
        seconds = sum(kernels.seconds_expected(k, job.architectures, loaded.shared_ptx) for k in fresh)
        table.add_row(
            job.target.name,
            _makes(loaded, job, options),
            str(len(job.kernels)),
            str(len(job.kernels) - len(fresh)),
            compiles,
            ", ".join(job.architectures),
            console.duration(seconds + 40),
        )
    console.out.print(table)


def _unserved(jobs: list[Job]) -> str | None:
    """That this machine has GPUs, and runs none of these wheels, in words."""
    found = machine_gpus.found()
    told = [machine_gpus.unserved(found, job.architectures, job.target.cuda) for job in jobs]
    return f"{told[0]}." if all(told) else None


def _makes(loaded: matrix.Matrix, job: Job, options: argparse.Namespace) -> str:
    if options.stock:
        return kernels.STOCK.extension
    return f"{cpp_archive.NAME if options.cpp else 'flash_attn'} {loaded.version(job.target)}"


def _list_kernels(chosen: set[Kernel]) -> None:
    """Tell which kernels are meant, a row for each pass and head dim."""
    table = Table("pass", "head dim", *DTYPES)
    for kind, head_dim in product(Pass, HEAD_DIMS):
        cells = []
        for dtype in DTYPES:
            masks = {k.causal for k in chosen if (k.kind, k.head_dim, k.dtype) == (kind, head_dim, dtype)}
            cells.append(", ".join("causal" if causal else "full" for causal in sorted(masks)))
        if any(cells):
            table.add_row(kind.value, str(head_dim), *(cell or "–" for cell in cells))
    console.out.print(table)
    console.note("Upstream's names of the kernel files end in _sm80.cu for every GPU.")


def _summary(jobs: list[Job], results: list[Built | BuildError]) -> None:
    table = Table("target", "wheel", "MB", "sha256", "seconds", "compiled, of which cached")
    for job, result in zip(jobs, results, strict=True):
        if isinstance(result, BuildError):
            table.add_row(job.target.name, "failed: " + str(result).splitlines()[0], "", "", "", "")
            continue
        done = result.compiled
        lookups = done.cache_hits + done.cache_misses
        cached = f"{done.built}, {100 * done.cache_hits // lookups} %" if lookups else str(done.built)
        table.add_row(
            job.target.name,
            result.path.name,
            f"{result.size / 1e6:.1f}",
            result.sha256[:16] + "…",
            f"{result.seconds:.0f}",
            cached,
        )
    console.out.print(table)

"""``bench``: measure the kernels on a GPU, or the build, beside upstream's."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts.base import console, layout
from scripts.base.errors import UsageError
from scripts.commands import arguments
from scripts.lab import (
    build_cost,
    build_figures,
    fa4_figures,
    kernel_figures,
    kernel_picture,
    kernel_speed,
    scaling,
)
from scripts.source import kernel_set, matrix
from scripts.wheels.building import build, jobs
from scripts.wheels.toolchain import compilers

if TYPE_CHECKING:
    from collections.abc import Sequence


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(
        commands,
        "bench",
        "kernels: build the wheel and upstream's kernels of the same pin, time both in one process on this "
        "machine's GPU, and hold the figures against the goals. build: compile the same kernel files as "
        "this build system does and as upstream's setup.py does, without a compile cache, and compare. "
        "fa4: hold figures of FlashAttention-4's kernels, which tests/wheel4/bench.py measures, against the "
        "goals. workers: simulate 1 to 256 workers of build --scheduler.",
    )
    parser.add_argument(
        "what",
        choices=["kernels", "fa4", "build", "workers"],
        nargs="?",
        default="kernels",
        help="what to measure (default: kernels)",
    )
    parser.add_argument(
        "--kernels",
        metavar="SET",
        type=arguments.kernel_choice,
        help=f"which kernel files (default: {kernel_speed.KERNELS}, or {build_cost.KERNELS} for build; "
        "see nox -s build -- --help)",
    )
    _add_kernels(parser)
    parser.add_argument(
        "--target", metavar="NAME", help="the target (default: the one marked in wheel_matrix.toml)"
    )
    parser.add_argument(
        "--python", metavar="X.Y", type=arguments.python, help="the Python (default: the one running this)"
    )
    arguments.add_jobs(parser)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments.add_source(parser)
    parser.set_defaults(
        run=_run, interrupted="interrupted. What was compiled is kept: the same command goes on from there."
    )


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    """Options of bench -- kernels alone."""
    parser.add_argument(
        "--from",
        dest="figures",
        metavar="FILE",
        type=Path,
        help="kernels: measure nothing; take what tests/wheel/bench.py wrote. fa4: take what "
        "tests/wheel4/bench.py wrote. workers: take a build's own times, build/ninja/*/.ninja_log",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE.svg",
        type=_picture,
        help="kernels: draw time and memory over the length of sequences. fa4: draw time beside others'. "
        "workers: draw the speed-up",
    )


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".svg", ".png") or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name for a picture in a folder that exists (FILE.svg or FILE.png)"
        )
    return path


def _target(loaded: matrix.Matrix, options: argparse.Namespace) -> matrix.Target:
    return loaded.named(options.target) if options.target else loaded.default()


def _job(target: matrix.Target, options: argparse.Namespace, default: str) -> jobs.Job:
    kernels = options.kernels or kernel_set.parse_kernels(default)
    return jobs.Job(target, kernels, target.architectures)


def _run(options: argparse.Namespace) -> None:
    if options.what == "kernels":
        _kernels(options)
        return
    if options.what == "workers":
        _workers(options)
        return
    if options.what == "fa4":
        _fa4(options)
        return
    if options.figures or options.picture:
        raise UsageError("--from and --picture are for bench -- kernels, fa4 and workers.")
    _build(options)


def _kernels(options: argparse.Namespace) -> None:
    path = options.figures
    if path is None:
        kernel_speed.require_gpu()
        path = layout.BUILD / "bench" / "kernels.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        loaded = matrix.load(layout.MATRIX)
        job = _job(_target(loaded, options), options, kernel_speed.KERNELS)
        kernel_speed.measure(loaded, job, build.BuildOptions(options.source, options.jobs), path)
    figures = kernel_figures.read(path)
    goals = kernel_figures.goals(figures.rows)
    _tell_goals(options, figures.gpu, figures.torch, goals)
    if options.picture:
        kernel_picture.draw(figures, options.picture)
        console.done(f"{options.picture}")
    console.note(f"every figure: {path}")


def _fa4(options: argparse.Namespace) -> None:
    """Show what was measured of FlashAttention-4's kernels."""
    if options.figures is None:
        raise UsageError(
            "bench -- fa4 takes figures: on a machine with a GPU and both wheels, run PYTHONPATH=tests/wheel "
            "python tests/wheel4/bench.py --json FILE; then nox -s bench -- fa4 --from FILE."
        )
    figures = fa4_figures.read(options.figures)
    goals = fa4_figures.goals(figures)
    _tell_goals(options, figures.gpu, figures.torch, goals)
    if options.picture:
        fa4_figures.draw(figures, options.picture)
        console.done(f"{options.picture}")


def _workers(options: argparse.Namespace) -> None:
    """Simulate how long the kernel files take on 1 to 256 workers."""
    loaded = matrix.load(layout.MATRIX)
    target = _target(loaded, options)
    if options.figures:
        seconds = scaling.logged(options.figures)
    else:
        seconds = scaling.expected(options.kernels or target.kernels, target.architectures)
    shown = scaling.cases(seconds, len({one.cuda for one in loaded.targets}))
    if options.json:
        console.result(
            [
                {
                    "what": case.what,
                    "seconds": {n: case.length(n) for n in scaling.WORKERS},
                    "enough": case.enough,
                }
                for case in shown
            ]
        )
    table = Table("workers", *(case.what for case in shown))
    for workers in scaling.WORKERS:
        table.add_row(str(workers), *(console.duration(case.length(workers)) for case in shown))
    table.add_row("enough", *(str(case.enough) for case in shown))
    console.out.print(table)
    if options.picture:
        scaling.draw(shown, options.picture)
        console.done(f"{options.picture}")


def _tell_goals(
    options: argparse.Namespace, gpu: str, torch: str, goals: Sequence[kernel_figures.Goal]
) -> None:
    if options.json:
        met = [vars(goal) | {"met": goal.met} for goal in goals]
        console.result({"gpu": gpu, "torch": torch, "goals": met})
    table = Table("figure", "measured", "goal", "")
    words = {True: "met", False: "missed", None: "not measured"}
    for goal in goals:
        value = "" if goal.value is None else f"{goal.value:.2f} {goal.unit}".strip()
        table.add_row(
            goal.what,
            value,
            f"at {'least' if goal.at_least else 'most'} {goal.goal:g} {goal.unit}".strip(),
            words[goal.met],
        )
    console.out.print(table)
    console.note(f"{gpu}, torch {torch}; ratios of medians, alternating in one process")


def _build(options: argparse.Namespace) -> None:
    loaded = matrix.load(layout.MATRIX)
    target = _target(loaded, options)
    if unknown := [a for a in target.architectures if a not in build_cost.ARCHITECTURES]:
        raise UsageError(
            f"upstream's setup.py knows no compute capability {', '.join(unknown)}; "
            f"it has {', '.join(build_cost.ARCHITECTURES)}."
        )
    job = _job(target, options, build_cost.KERNELS)
    python = options.python or compilers.running_python()
    tools = compilers.assemble(target, python, layout.BUILD, cache=False)
    folder = build_cost.folder_of(loaded, job, tools)
    ours, theirs = build_cost.compare(
        loaded, job, tools, build.BuildOptions(options.source, options.jobs), folder
    )
    lines = build_figures.lines(ours, theirs)
    if options.json:
        facts: dict[str, Any] = {
            "target": target.name,
            "python": python,
            "kernels": [k.name for k in job.kernels],
        }
        console.result(
            facts
            | {"ours": asdict(ours.side), "without_bias": ours.without_bias, "upstream": asdict(theirs)}
            | {"figures": [asdict(line) | {"met": line.met} for line in lines]}
        )
    _show_files(ours, theirs)
    _show(lines)
    shutil.rmtree(folder)


def _show_files(ours: build_figures.Ours, theirs: build_figures.Side) -> None:
    table = Table(
        "CPU seconds of nvcc",
        "ours",
        "upstream's setup.py",
        "figure",
        *(["without masks and biases", "figure"] if ours.without_bias else []),
    )
    for name, seconds in ours.side.kernels.items():
        cells = [
            name,
            f"{seconds:.0f}",
            f"{theirs.kernels[name]:.0f}",
            f"{seconds / theirs.kernels[name]:.2f} ×",
        ]
        if ours.without_bias:
            cells += [f"{ours.without_bias[name]:.0f}", f"{seconds / ours.without_bias[name]:.2f} ×"]
        table.add_row(*cells)
    console.out.print(table)


def _show(lines: Sequence[build_figures.Line]) -> None:
    table = Table("what", "ours", "upstream's setup.py", "figure", "goal", "")
    for line in lines:
        figure, goal = (
            f"{number:.2f} {line.unit}" if "×" in line.unit else f"{number:.0f} {line.unit}"
            for number in (line.value, line.goal)
        )
        table.add_row(
            line.what, line.ours, line.upstream, figure, f"at most {goal}", "met" if line.met else "missed"
        )
    console.out.print(table)

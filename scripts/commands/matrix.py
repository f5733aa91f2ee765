"""``matrix``: list the targets, or render the workflow that builds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts.base import console, layout
from scripts.commands import arguments
from scripts.source import kernel_set, matrix
from scripts.wheels.releasing import workflow

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(commands, "matrix")
    parser.add_argument("--github", action="store_true", help=f"write {workflow.PATH}: a job for each target")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the workflow is stale")
    parser.set_defaults(run=_run, interrupted="interrupted; nothing was changed.")


def _run(options: argparse.Namespace) -> None:
    loaded = matrix.load(layout.MATRIX)
    if not (options.github or options.check):
        list_targets(loaded)
    elif options.check:
        workflow.check(layout.ROOT, workflow.render(loaded))
        console.done(f"{workflow.PATH} is what {loaded.path.name} says.")
    else:
        written = workflow.write(layout.ROOT, workflow.render(loaded))
        console.done(f"{workflow.PATH} written." if written else f"{workflow.PATH} was up to date.")


def list_targets(loaded: matrix.Matrix) -> None:
    """The table of an upstream's targets."""
    table = Table("target", "CUDA", "torch", "arch", "kernels", "wheel version")
    for target in loaded.targets:
        name = target.name + (" (default)" if target.default else "")
        table.add_row(
            name,
            target.cuda,
            target.torch,
            ", ".join(target.architectures),
            f"{len(target.kernels)} of {len(kernel_set.ALL_KERNELS)}",
            loaded.version(target),
        )
    console.out.print(table)

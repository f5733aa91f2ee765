"""``guards``: each patch's guard, without the patch and with it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts.base import console
from scripts.commands import arguments
from scripts.series import clone, guards
from scripts.wheels.compiling import compile_alone

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(
        commands, "guards", "A guard must fail on the tree without its patch, and pass with it."
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    with clone.view(options.source) as (patches, applied):
        outcomes = guards.run(patches, applied, compile_alone)
    if options.json:
        console.result(
            [{**asdict(o), "guard": str(o.guard), "discriminates": o.discriminates} for o in outcomes]
        )
    else:
        table = Table("patch", "guard", "without", "with", "whole series")
        for o in outcomes:
            table.add_row(
                o.patch.partition("-")[0],
                str(o.guard),
                *("passes" if passed else "fails" for passed in (o.before, o.after, o.whole)),
            )
        console.out.print(table)
    guards.require(outcomes)
    console.done(
        f"{len(outcomes)} guards of {len(patches.patches)} patches fail without their patch and pass with it."
    )

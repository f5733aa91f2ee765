"""``guards``: each patch's guard, without the patch and with it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts.base import console
from scripts.commands import arguments
from scripts.series import clone, guards
from scripts.wheels.compiling.ninja import compile_alone

if TYPE_CHECKING:
    import argparse

    from scripts.source.matrix import Matrix


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(
        commands,
        "guards",
        "A guard must fail on the tree without its patch, and pass with it.",
        otherwise="every one; with PATCH the first",
    )
    parser.add_argument("patch", metavar="PATCH", nargs="?", help="run the guards of this patch alone")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    # A patch that is named is one of the first's unless --upstream says otherwise.
    every = (arguments.chosen(options),) if options.patch else arguments.every_chosen(options)
    by_upstream = [(loaded, _outcomes(loaded, options)) for loaded in every]
    outcomes = [outcome for _, some in by_upstream for outcome in some]
    if options.json:
        console.result([_as_data(outcome) for outcome in outcomes])
    else:
        table = Table("patch", "guard", "without", "with", "whole series")
        for o in outcomes:
            table.add_row(
                o.patch.removesuffix(".patch"),
                str(o.guard),
                *("passes" if passed else "fails" for passed in (o.before, o.after, o.whole)),
            )
        console.out.print(table)
    for loaded, some in by_upstream:
        guards.require(some, None if loaded.is_first else loaded.name)
    console.done(
        f"{len(outcomes)} guards of {len({o.patch for o in outcomes})} patches fail without their patch and "
        "pass with it."
    )


def _outcomes(loaded: Matrix, options: argparse.Namespace) -> list[guards.Outcome]:
    """What the guards of one series say."""
    with clone.view(loaded, options.source) as (patches, applied):
        only = patches.named(options.patch) if options.patch else None
        return guards.run(patches, applied, compile_alone, only)


def _as_data(outcome: guards.Outcome) -> dict[str, Any]:
    facts = asdict(outcome)
    facts.pop("output")
    return {**facts, "guard": str(outcome.guard), "discriminates": outcome.discriminates}

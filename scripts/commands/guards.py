"""``guards``: each patch's guard, without the patch and with it; and what holds of the whole tree."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts.base import console
from scripts.commands import arguments
from scripts.series import clone, features, guards, places, whole
from scripts.wheels.compiling.ninja import compile_alone

if TYPE_CHECKING:
    import argparse

    from scripts.source.matrix import Matrix


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(
        commands,
        "guards",
        "A guard must fail on the tree without its patch, and pass with it. What features of fork/NAME.toml "
        "hold of the whole tree must pass.",
        otherwise="every one; with PATCH the first",
    )
    parser.add_argument("patch", metavar="PATCH", nargs="?", help="run the guards of this patch alone")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    # A patch that is named is one of the first's unless --upstream says otherwise.
    every = (arguments.chosen(options),) if options.patch else arguments.every_chosen(options)
    by_upstream = [(loaded, *_outcomes(loaded, options)) for loaded in every]
    outcomes = [outcome for _, some, _ in by_upstream for outcome in some]
    of_the_whole = [held for _, _, some in by_upstream for held in some]
    if options.json:
        console.result([*map(_as_data, outcomes), *map(_held_as_data, of_the_whole)])
    else:
        table = Table("patch", "guard", "without", "with", "whole series")
        for o in outcomes:
            table.add_row(
                o.patch.removesuffix(".patch"),
                str(o.guard),
                *("passes" if passed else "fails" for passed in (o.before, o.after, o.whole)),
            )
        for held in of_the_whole:
            table.add_row(held.feature, str(held.guard), "–", "–", "passes" if held.passed else "fails")
        console.out.print(table)
    for loaded, some, checks in by_upstream:
        guards.require(some, None if loaded.is_first else loaded.name, whole.faults(checks))
    console.done(
        f"{len(outcomes)} guards of {len({o.patch for o in outcomes})} patches fail without their patch and "
        f"pass with it{f'; {len(of_the_whole)} of the whole tree pass' if of_the_whole else ''}."
    )


def _outcomes(loaded: Matrix, options: argparse.Namespace) -> tuple[list[guards.Outcome], list[whole.Held]]:
    """What the guards of one series say, and what is checked of its whole tree unless a patch is named."""
    with clone.view(loaded, options.source) as (patches, applied):
        only = patches.named(options.patch) if options.patch else None
        outcomes = guards.run(patches, applied, compile_alone, only)
        told = None if options.patch else features.read(places.of(loaded).own)
        return outcomes, whole.run(told, applied)


def _as_data(outcome: guards.Outcome) -> dict[str, Any]:
    facts = asdict(outcome)
    facts.pop("output")
    return {**facts, "guard": str(outcome.guard), "discriminates": outcome.discriminates}


def _held_as_data(held: whole.Held) -> dict[str, Any]:
    """As a guard that no patch has."""
    facts = {"patch": None, "before": None, "after": None, "whole": held.passed, "there": True}
    return {**facts, "feature": held.feature, "guard": str(held.guard), "discriminates": held.passed}

"""``each`` and ``bisect``: run a command on upstream and after patches."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from scripts.base import console, layout
from scripts.base.errors import SeriesError
from scripts.commands import arguments
from scripts.series import clone, prefixes


def add(commands: Any) -> None:
    """The two sub-parsers; each sets ``run``."""
    for name, run in (("each", _each), ("bisect", _bisect)):
        parser = arguments.series_parser(
            commands,
            name,
            "The command runs in the work tree, with FA2_PATCH and FA2_SOURCE set; status 125: "
            "cannot be tested.",
        )
        parser.add_argument(
            "--run", dest="run_command", metavar="CMD", type=_command, required=True, help="a shell command"
        )
        parser.set_defaults(run=run)


def _command(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return text


def _each(options: argparse.Namespace) -> None:
    with clone.view(arguments.chosen(options), options.source) as (patches, applied):
        runs = prefixes.each(patches, applied, options.run_command, layout.BUILD / "tmp")
    if options.json:
        console.result([asdict(r) for r in runs])
    failed = [run for run in runs if not run.passed and run.status != prefixes.UNTESTABLE]
    if failed:
        listed = "\n".join(f"    {run.what} (status {run.status})" for run in failed)
        raise SeriesError(f"it fails on {len(failed)} of {len(runs)}:\n{listed}")
    if untested := [r.patch for r in runs if not r.passed]:
        raise SeriesError(
            f"it could not be tested (125) on {', '.join(untested)}; it passes on the other "
            f"{len(runs) - len(untested)}."
        )
    console.done(f"It passes on upstream and after every one of the {len(patches.patches)} patches.")


def _bisect(options: argparse.Namespace) -> None:
    with clone.view(arguments.chosen(options), options.source) as (patches, applied):
        first, runs = prefixes.bisect(patches, applied, options.run_command, layout.BUILD / "tmp")
    if options.json:
        console.result({"first_failing": first, "runs": [asdict(r) for r in runs]})
    console.done(
        "It passes on the whole series; nothing to look for."
        if first is None
        else f"{first} is the first patch with which it fails."
    )

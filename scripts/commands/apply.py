"""``apply``: the series to upstream in build/source, as commits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scripts.base import console
from scripts.commands import arguments
from scripts.series import clone
from scripts.wheels.compiling import editors

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(commands, "apply", "As commits, and exactly: no fuzz, no offset.")
    parser.add_argument(
        "--to", metavar="PATCH", help="stop after this patch (its place, a file name, or a part of one)"
    )
    parser.add_argument(
        "--reset",
        action="store_true",
        help="replace whatever build/source holds (what a tree that apply made had besides stays under "
        "refs/replaced)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    loaded = arguments.chosen(options)
    count = None if options.to is None else clone.series(loaded).named(options.to) + 1
    patches, applied = clone.apply(loaded, options.source, count=count, reset=options.reset)
    if written := editors.write(loaded, patches, applied):
        console.note(f"for editors: {written}")
    if options.json:
        names = [p.name for p in patches.patches]
        console.result(
            {
                "root": str(applied.root),
                "base": applied.base,
                "commit": applied.commit,
                "digest": applied.digest,
                "patches": names,
            }
        )

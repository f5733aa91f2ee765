"""``changes``: CHANGES.md from the patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scripts.base import console, layout
from scripts.commands import arguments
from scripts.series import changes
from scripts.source import matrix

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(commands, "changes", needs_source=False, otherwise="every one")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when CHANGES.md is stale")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    text = changes.render(matrix.load(layout.MATRIX), layout.ROOT)
    path = layout.ROOT / "CHANGES.md"
    if options.check:
        changes.check(path, text)
        written = False
        console.done("CHANGES.md is what the patches say.")
    else:
        written = changes.write(path, text)
        console.done("CHANGES.md written." if written else "CHANGES.md was up to date.")
    if options.json:
        console.result({"written": written})

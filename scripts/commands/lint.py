"""``lint``: whether the patches are well-formed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.base import console, layout
from scripts.base.errors import SeriesError
from scripts.commands import arguments
from scripts.series import lint, places

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(
        commands,
        "lint",
        "Headers, trailers, the series file, paths and whitespace.",
        needs_source=False,
        otherwise="every one",
    )
    parser.add_argument(
        "patches", metavar="FOLDER", nargs="?", type=Path, help="default: the series of every upstream"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    every = arguments.every_chosen(options)
    folders = {places.of(one).patches: (one.upstream.package, places.of(one).own) for one in every}
    if options.patches:
        folder = options.patches.resolve()
        package = every[0].upstream.package if options.upstream else None
        folders = {folder: folders.get(folder, (package, None))}
    problems = [problem for folder, of in folders.items() for problem in lint.check(folder, *of)]
    if options.json:
        console.result([{"path": str(p.path), "line": p.line, "text": p.text} for p in problems])
    if problems:
        listed = "\n".join(str(p).removeprefix(f"{layout.ROOT}/") for p in problems)
        raise SeriesError(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the series:\n{listed}")
    console.done("The series is well-formed." if len(folders) == 1 else "Every series is well-formed.")

"""``export``: the commits of build/source back to patches/."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scripts.base import console, files, layout
from scripts.base.errors import UsageError
from scripts.commands import arguments
from scripts.series import clone, export, places, rebase_state
from scripts.source import upstream

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(commands, "export", needs_source=False)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail where patches/ is not what build/source says",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    loaded = arguments.chosen(options)
    place = places.of(loaded)
    if options.check and not place.source.exists():
        clone.apply(loaded, upstream.Source.AUTO)
    if not options.check and rebase_state.under_way(place.rebase):
        raise UsageError(
            "a rebase is under way and will write patches/ itself: finish it (nox -s rebase -- --continue) "
            "or drop it (--abort) first."
        )
    with files.alone(layout.BUILD):
        done = export.export(place.source, place.patches, check=options.check)
    written = _files_in_words(done)
    console.done(
        f"{written}. Next: nox -s lint, nox -s guards, nox -s changes."
        if written
        else "patches/ is what build/source says."
    )
    if options.json:
        console.result(asdict(done))


def _files_in_words(done: export.Exported) -> str:
    """The files of patches/ that were written and removed, in words; empty for none."""
    return "; ".join(
        f"{verb} {', '.join(names)}"
        for verb, names in (("wrote", done.written), ("removed", done.removed))
        if names
    )

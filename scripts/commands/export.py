"""``export``: the commits of build/source back to patches/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scripts.base import console, files, layout
from scripts.base.errors import UsageError
from scripts.commands import arguments
from scripts.series import clone, export, places, rebase_state
from scripts.source import upstream

if TYPE_CHECKING:
    import argparse

    from scripts.source.matrix import Matrix


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(
        commands, "export", needs_source=False, otherwise="the first; with --check every one"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail where patches/ is not what build/source says",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    every = arguments.every_chosen(options) if options.check else (arguments.chosen(options),)
    done = [_export(loaded, options) for loaded in every]
    if options.json:
        fields = ("written", "removed", "own_written", "own_removed")
        console.result({field: [name for one in done for name in getattr(one, field)] for field in fields})


def _export(loaded: Matrix, options: argparse.Namespace) -> export.Exported:
    """Write or check one series."""
    place = places.of(loaded)
    if options.check and not place.source.exists():
        clone.apply(loaded, upstream.Source.AUTO)
    if not options.check and rebase_state.under_way(place.rebase):
        raise UsageError(
            "a rebase is under way and will write patches/ itself: finish it (nox -s rebase -- --continue) "
            "or drop it (--abort) first."
        )
    with files.alone(layout.BUILD):
        done = export.export(
            place.source,
            place.patches,
            place.own,
            package=loaded.upstream.package,
            check=options.check,
        )
    written = _files_in_words(done)
    console.done(
        f"{written}. Next: nox -s lint, nox -s guards, nox -s changes."
        if written
        else f"{' and '.join(filter(None, (loaded.table.series, loaded.table.own)))} "
        f"{'are' if loaded.table.own else 'is'} what build/{place.source.name} says."
    )
    return done


def _files_in_words(done: export.Exported) -> str:
    """The patches and own files that were written and removed, in words; empty for none."""
    return "; ".join(
        f"{verb} {', '.join(names)}"
        for verb, names in (
            ("wrote", (*done.written, *done.own_written)),
            ("removed", (*done.removed, *done.own_removed)),
        )
        if names
    )

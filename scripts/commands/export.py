"""``export``: the commits of build/source back to patches/."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scripts.base import console, files, layout
from scripts.base.errors import SeriesError, UsageError
from scripts.base.git import Repository
from scripts.commands import arguments
from scripts.series import branches, clone, export, places
from scripts.series.rebase import state as rebase_state
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
        help="write nothing; fail where patches/ or fork/ is not what build/source says",
    )
    parser.add_argument(
        "--branch",
        action=arguments.Once,
        metavar="NAME",
        help="write nothing to patches/: make a branch in build/source's repository, of upstream, and of "
        "fork/ and patches/ as they lie in this clone",
    )
    parser.add_argument(
        "--patch",
        action=arguments.Once,
        metavar="PATCH",
        help="with --branch: of this patch alone, on upstream's commit (its place, or a part of its name)",
    )
    parser.add_argument(
        "--force", action="store_true", help="with --branch: replace a branch that has other commits"
    )
    arguments.add_source(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.branch is not None:
        _branch(arguments.chosen(options), options)
        return
    if options.patch or options.force:
        raise UsageError("--patch and --force are for --branch.")
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
    if done.own_behind:
        listed = ", ".join(f"{loaded.table.own}/{name}" for name in done.own_behind)
        console.note(
            f"{places.command('apply', place.source)} takes into build/{place.source.name}: {listed}"
        )
    written = _files_in_words(done, loaded.table.own)
    folders = [folder for folder in (loaded.table.series, loaded.table.own) if folder]
    if written:
        console.done(f"{written}. Next: nox -s lint, nox -s guards, nox -s changes.")
    elif done.own_behind:
        console.done(f"Nothing in build/{place.source.name} is to be exported.")
    else:
        verb = "are" if len(folders) > 1 else "is"
        console.done(f"{' and '.join(folders)} {verb} what build/{place.source.name} says.")
    return done


def _branch(loaded: Matrix, options: argparse.Namespace) -> None:
    """Make a branch of the series, or of a patch."""
    if options.check:
        raise UsageError("--branch writes nothing to patches/; leave --check out.")
    place = places.of(loaded)
    if not place.source.exists():
        clone.apply(loaded, options.source)
    checkout = upstream.pinned(loaded.upstream, options.source)
    with files.alone(layout.BUILD), clone.view(loaded, options.source) as (patches, applied):
        asked = branches.Asked(options.branch, options.patch, options.force)
        theirs = layout.UPSTREAM if checkout.source is upstream.Source.GIT else None
        made = branches.make(
            Repository(place.source, SeriesError), patches, applied, asked, theirs, loaded.upstream
        )
    if options.json:
        console.result(asdict(made))
    where = f"build/{place.source.name}"
    count = f"{made.commits} commit{'s' if made.commits != 1 else ''} on {made.upstream[:12]}"
    kept = "" if made.changed else ", as it was"
    console.done(
        f"{made.name} in {where}: {count}, the last {made.commit[:12]}{kept}. "
        f"Push it: git -C {where} push URL {made.name}"
    )
    if theirs is None:
        console.warn(
            f"{made.upstream[:12]} is a commit of the sdist's files, and none of upstream's: a branch for a "
            "pull request there needs --source git, and so the submodule."
        )


def _files_in_words(done: export.Exported, own: str | None) -> str:
    """The patches and own files that were written and removed, in words; empty for none."""
    return "; ".join(
        f"{verb} {', '.join((*patches, *(f'{own}/{name}' for name in ours)))}"
        for verb, patches, ours in (
            ("wrote", done.written, done.own_written),
            ("removed", done.removed, done.own_removed),
        )
        if patches or ours
    )

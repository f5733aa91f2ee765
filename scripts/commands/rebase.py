"""``rebase``: move the series to another release of upstream."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scripts.base import console, files, layout
from scripts.base.errors import SeriesError, UsageError
from scripts.commands import arguments
from scripts.series import clone, places, tree
from scripts.series.rebase import state as rebase_state
from scripts.series.rebase import status as rebase_status
from scripts.series.rebase.steps import Rebase
from scripts.series.upstream import move
from scripts.series.upstream import words as upstream_words
from scripts.source import releases, upstream
from scripts.wheels.compiling.ninja import compile_alone

if TYPE_CHECKING:
    import argparse

    from scripts.series.rebase.state import Report
    from scripts.source.matrix import Matrix

_CHOICES = "VERSION (2.8.3.post2, a tag, a commit, or latest), --continue, --use-remembered, --skip, --abort"


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(
        commands,
        "rebase",
        "Stops where a person must look, and says what to do next. Alone it says where it stands.",
    )
    parser.add_argument(
        "version",
        metavar="VERSION",
        nargs="?",
        help="a release, a tag, a commit (of the submodule), or 'latest'",
    )
    parser.add_argument(
        "--continue",
        dest="proceed",
        action="store_true",
        help="go on after a conflict was resolved, or after a run that was killed",
    )
    parser.add_argument("--skip", action="store_true", help="leave the patch out that stopped the rebase")
    parser.add_argument(
        "--reason", metavar="WHY", default="", help="with --skip: why; recorded in the file series"
    )
    parser.add_argument(
        "--use-remembered",
        action="store_true",
        help="take the resolution that was shown: of the same conflict, in an earlier rebase or try",
    )
    parser.add_argument("--abort", action="store_true", help="drop the rebase; nothing has changed")
    parser.set_defaults(
        run=_run, interrupted="interrupted; nox -s rebase -- --continue goes on, --abort drops it."
    )


def _run(options: argparse.Namespace) -> None:
    chosen = [bool(options.version), options.proceed, options.skip, options.use_remembered, options.abort]
    if sum(chosen) > 1:
        raise UsageError(f"say one of: {_CHOICES}.")
    if options.reason and not options.skip:
        raise UsageError("--reason belongs to --skip.")
    loaded = _chosen(options)
    rebase = Rebase(layout.ROOT, places.of(loaded).rebase, compile_alone)
    if not any(chosen):
        _tell_standing(rebase, loaded, as_json=options.json)
        return
    before = layout.MATRIX.read_bytes()
    try:
        with files.alone(layout.BUILD):
            report = _run_rebase(rebase, loaded, options)
    except KeyboardInterrupt:
        if not rebase.under_way:
            same = layout.MATRIX.read_bytes() == before
            what = "nothing was changed" if same else "wheel_matrix.toml and the series were written"
            options.interrupted = f"interrupted; {what}, and no rebase is under way."
        raise
    if report is None:
        console.result({"aborted": True}) if options.json else None
        return
    _tell(report, loaded)
    if options.json:
        console.result(report.as_json())


def _chosen(options: argparse.Namespace) -> Matrix:
    """The matrix as the upstream that is rebased sees it.

    One rebase at a time: all write wheel_matrix.toml and CHANGES.md. So what goes on with it needs no
    --upstream.
    """
    loaded = arguments.chosen(options)
    begun = next((one for one in loaded.each() if rebase_state.under_way(places.of(one).rebase)), None)
    if begun is None or begun.name == loaded.name:
        return loaded
    if options.version or options.upstream is not None:
        raise UsageError(
            f"a rebase of {begun.name} is under way; finish it (nox -s rebase -- --continue), or drop it "
            "(--abort), first."
        )
    return begun


def _run_rebase(rebase: Rebase, loaded: Matrix, options: argparse.Namespace) -> Report | None:
    if options.abort:
        console.done(rebase.abort())
        return None
    if options.proceed:
        return rebase.proceed()
    if options.use_remembered:
        return rebase.use_remembered()
    if options.skip:
        return rebase.skip(options.reason)
    if rebase.under_way:
        raise UsageError("a rebase is under way; --continue, --skip or --abort it.")
    place = places.of(loaded)
    if stake := tree.unsaved(place.source):
        raise SeriesError(
            f"{stake}. Export it first ({places.command('export', place.source)}), or throw it away "
            f"({places.command('apply', place.source, '--reset')})."
        )
    patches = clone.series(loaded)
    checkout = upstream.pinned(loaded.upstream, options.source)
    release = releases.find(loaded, options.version, layout.UPSTREAM, layout.cache("sdist"), options.source)
    console.step(f"Rebase of {loaded.name} from {loaded.upstream.version} to {release.name} ({release.how})")
    return rebase.start(loaded, patches, checkout, release)


def _tell_standing(rebase: Rebase, loaded: Matrix, *, as_json: bool) -> None:
    """Where a rebase stands, or how to begin one."""
    standing = rebase_status.standing(rebase.folder) if rebase.under_way else None
    if as_json:
        console.result({"under_way": False} if standing is None else {"under_way": True, **asdict(standing)})
    if standing is None:
        place, version = places.of(loaded).source, loaded.upstream.version
        console.done(f"No rebase is under way; the series stands on {version}.")
        console.note(f"{places.command('forecast', place, 'latest')} says what would become of each patch")
        console.note(
            f"{places.command('rebase', place, 'VERSION')} begins: a release, a tag, a commit, or latest"
        )
        return
    for line in standing.lines:
        console.note(line)


def _tell(report: Report, loaded: Matrix) -> None:
    console.step(f"Rebased from {report.old} to {report.new}")
    for done in report.done:
        console.note(f"{done.patch}: {f'skipped: {done.reason}' if done.reason else done.outcome}")
        for line in move.summary(done.evidence):
            console.note(f"    {line}")
    console.step("What changed in the patches themselves (git range-diff, old against new)")
    for line in report.range_diff.splitlines():
        console.note(line)
    console.note(
        f"{loaded.table.series}: {_counted_files(report) or 'no byte differs'}; wheel_matrix.toml and "
        f"CHANGES.md name {report.new}"
    )
    for name in report.own:
        console.note(f"{loaded.table.own}/{name}: changed, as resolutions have it")
    console.note(report.submodule)
    package = loaded.upstream.package
    if lines := upstream_words.lines(report.upstream, report.series, package):
        console.step(f"What upstream changed in {report.new}, whether a patch conflicted or not")
        for line in lines:
            console.note(line)
    console.step("Next")
    which = "" if loaded.is_first else f" -- --upstream {loaded.name}"
    folders = " ".join(filter(None, (loaded.table.series, loaded.table.own)))
    submodule = " upstream" if loaded.is_first else ""
    if report.kernels:
        console.note(
            f"{len(report.kernels)} kernel files may differ: nox -s build -- --kernels {report.kernel_words}"
        )
    elif loaded.table.kind == "cuda":
        console.note("no kernel file differs")
    console.note(
        f"to take it back: git restore --staged --worktree {folders} wheel_matrix.toml CHANGES.md"
        f"{submodule}; git clean -f {folders}"
    )
    console.note(
        f"nox -s build{which}; nox -s tests; nox -s verify, on a machine with a GPU; "
        f"then git add {folders} wheel_matrix.toml CHANGES.md{submodule}, and git commit"
    )
    console.done(f"The series stands on {report.new}.")


def _counted_files(report: Report) -> str:
    """How many files of patches/ were written and removed; git status names them. Empty for none."""
    counts = [("wrote", len(report.written)), ("removed", len(report.removed))]
    return ", ".join(f"{verb} {count} file{'s' * (count > 1)}" for verb, count in counts if count)

"""``rebase``: move the series to another release of upstream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scripts.base import console, files, layout
from scripts.base.errors import SeriesError, UsageError
from scripts.commands import arguments
from scripts.series import model, move, places, tree
from scripts.series.rebase import Rebase
from scripts.source import releases, upstream
from scripts.wheels.compiling import compile_alone

if TYPE_CHECKING:
    import argparse

    from scripts.series.rebase_state import Report


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(
        commands, "rebase", "Stops where a person must look, and says what to do next."
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
        "--reason", metavar="WHY", default="", help="with --skip: why; recorded in patches/series"
    )
    parser.add_argument("--abort", action="store_true", help="drop the rebase; nothing has changed")
    parser.set_defaults(
        run=_run, interrupted="interrupted; nox -s rebase -- --continue goes on, --abort drops it."
    )


def _run(options: argparse.Namespace) -> None:
    rebase = Rebase(layout.ROOT, layout.BUILD / "rebase", compile_alone)
    chosen = [bool(options.version), options.proceed, options.skip, options.abort]
    if sum(chosen) != 1:
        raise UsageError(
            "say one of: VERSION (2.8.3.post2, a tag, a commit, or latest), --continue, --skip, --abort."
        )
    if options.reason and not options.skip:
        raise UsageError("--reason belongs to --skip.")
    try:
        with files.alone(layout.BUILD):
            report = _run_rebase(rebase, options)
    except KeyboardInterrupt:
        if not rebase.under_way:
            options.interrupted = "interrupted; nothing was changed, and no rebase is under way."
        raise
    if report is None:
        console.result({"aborted": True}) if options.json else None
        return
    _tell(report)
    if options.json:
        console.result(report.as_json())


def _run_rebase(rebase: Rebase, options: argparse.Namespace) -> Report | None:
    if options.abort:
        console.done(rebase.abort())
        return None
    if options.proceed:
        return rebase.proceed()
    if options.skip:
        return rebase.skip(options.reason)
    if rebase.under_way:
        raise UsageError("a rebase is under way; --continue, --skip or --abort it.")
    loaded = arguments.chosen(options)
    place = places.of(loaded)
    if stake := tree.unsaved(place.source):
        raise SeriesError(
            f"{stake}. Export it first (nox -s export), or throw it away (nox -s apply -- --reset)."
        )
    patches = model.read(place.patches)
    checkout = upstream.pinned(loaded.upstream, options.source)
    release = releases.find(loaded, options.version, layout.UPSTREAM, layout.cache("sdist"), options.source)
    console.step(f"Rebase from {loaded.upstream.version} to {release.name} ({release.how})")
    return rebase.start(loaded, patches, checkout, release)


def _tell(report: Report) -> None:
    console.step(f"Rebased from {report.old} to {report.new}")
    for done in report.done:
        console.note(f"{done.patch}: {f'skipped: {done.reason}' if done.reason else done.outcome}")
        for line in move.summary(done.evidence):
            console.note(f"    {line}")
    console.step("What changed in the patches themselves (git range-diff, old against new)")
    for line in report.range_diff.splitlines():
        console.note(line)
    console.note(
        f"patches/: {_counted_files(report) or 'no byte differs'}; wheel_matrix.toml and CHANGES.md name "
        f"{report.new}"
    )
    console.note(report.submodule)
    console.step("Next")
    if report.kernels:
        console.note(
            f"{len(report.kernels)} kernel files may differ: nox -s build -- --kernels {report.kernel_words}"
        )
    else:
        console.note("no kernel file differs")
    console.note(
        "to take it back: git restore --staged --worktree patches wheel_matrix.toml CHANGES.md upstream; "
        "git clean -f patches"
    )
    console.note(
        "nox -s build; nox -s tests; nox -s verify, on a machine with a GPU; "
        "then git add patches wheel_matrix.toml CHANGES.md upstream, and git commit"
    )
    console.done(f"The series stands on {report.new}.")


def _counted_files(report: Report) -> str:
    """How many files of patches/ were written and removed; git status names them. Empty for none."""
    counts = [("wrote", len(report.written)), ("removed", len(report.removed))]
    return ", ".join(f"{verb} {count} file{'s' * (count > 1)}" for verb, count in counts if count)

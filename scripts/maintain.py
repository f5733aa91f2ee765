"""The commands that keep the series: apply, export, patches, lint, guards, forecast, rebase, each, bisect, changes."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from rich.table import Table

from scripts.base import console, files, layout
from scripts.base.errors import SeriesError, UpstreamError, UsageError
from scripts.base.git import Repository
from scripts.commands import arguments
from scripts.lab import series_times
from scripts.series import changes, clone, export, forecast, guards, lint, model, move, prefixes, reach, rebase_state, tree
from scripts.series.rebase import Rebase
from scripts.source import kernel_set, matrix, releases, upstream
from scripts.wheels import compiling

if TYPE_CHECKING:
    from collections.abc import Callable

    from scripts.series.move import Move
    from scripts.series.rebase_state import Report


def _command(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return text


def _count(text: str | None) -> int | None:
    return None if text is None else model.read(layout.PATCHES).named(text) + 1


def _apply(options: argparse.Namespace) -> None:
    patches, applied = clone.apply(matrix.load(layout.MATRIX), options.source, count=_count(options.to), reset=options.reset)
    if options.json:
        names = [p.name for p in patches.patches]
        console.result({"root": str(applied.root), "base": applied.base, "commit": applied.commit, "digest": applied.digest, "patches": names})


def _files(done: export.Exported | Report) -> str:
    """The files of patches/ that were written and removed, in words; empty for none."""
    return "; ".join(f"{verb} {', '.join(names)}" for verb, names in (("wrote", done.written), ("removed", done.removed)) if names)


def _export(options: argparse.Namespace) -> None:
    if options.check and not layout.SOURCE.exists():
        clone.apply(matrix.load(layout.MATRIX), upstream.Source.AUTO)
    if not options.check and rebase_state.under_way(layout.BUILD / "rebase"):
        raise UsageError("a rebase is under way and will write patches/ itself: finish it (nox -s rebase -- --continue) or drop it (--abort) first.")
    with files.alone(layout.BUILD):
        done = export.export(layout.SOURCE, layout.PATCHES, check=options.check)
    written = _files(done)
    console.done(f"{written}. Next: nox -s lint, nox -s guards, nox -s changes." if written else "patches/ is what build/source says.")
    if options.json:
        console.result(asdict(done))


def _reach(options: argparse.Namespace) -> None:
    """Of one patch: what it touches, and what comes out otherwise with it."""
    loaded = matrix.load(layout.MATRIX)
    with clone.view(options.source) as (patches, applied):
        place = patches.named(options.patch)
        patch = patches.patches[place]
        repository = Repository(applied.root, SeriesError)
        commit = repository.commits(applied.base, applied.commit)[place]
        found = reach.reach(repository, applied.base, commit, patch, layout.ROOT)
    words = ",".join(kernel_set.spell_kernels(found.kernels)) if found.kernels else ""
    by_target = {target.name: [k.name for k in target.kernels if k in found.kernels] for target in loaded.targets}
    if options.json:
        console.result(
            {"patch": patch.name, **asdict(found), "kernels": [k.name for k in found.kernels], "kernel_words": words, "targets": by_target}
        )
        return
    table = Table("what", f"{patch.number} {patch.subject}", show_lines=True)
    table.add_row(f"upstream {loaded.upstream.version}", "\n".join(found.upstream) or "none of its lines")
    table.add_row("files of ours", "\n".join(found.own) or "–")
    count = f"{len(found.kernels)} of {len(kernel_set.ALL_KERNELS)}"
    table.add_row(
        "kernel files", f"{count}, by what they include (--kernels {words}); nox -s compare tells which kernels" if words else f"{count} include it"
    )
    compiled = [f"{name}: {len(names)} kernel files" for name, names in by_target.items() if names]
    table.add_row(
        "wheels", "\n".join(compiled or [f"all {len(by_target)} targets, their binding or Python files alone" if found.binding else "none"])
    )
    table.add_row("tests", "\n".join(found.tests) or "none named by its guards or message")
    console.out.print(table)


def _patches(options: argparse.Namespace) -> None:
    if options.patch:
        _reach(options)
        return
    with clone.view(options.source) as (patches, applied):
        repository = Repository(applied.root, SeriesError)
        commits = repository.commits(applied.base, applied.commit)
        names = {commit: patch.number for commit, patch in zip(commits, patches.patches, strict=True)}
        graph = {names[c]: sorted(names[n] for n in needed) for c, needed in move.needs(repository, commits).items()}
    if options.json:
        console.result(
            {
                "digest": applied.digest,
                "base": applied.base,
                "patches": [
                    {
                        "name": p.name,
                        "subject": p.subject,
                        "feature": p.feature,
                        "upstream_status": p.upstream_status,
                        "guards": p.guards,
                        "needs": graph[p.number],
                        "files": [asdict(f) for f in p.files],
                    }
                    for p in patches.patches
                ],
            }
        )
        return
    table = Table("patch", "feature", "Upstream-Status", "files", "+", "−", "needs", "guards", show_lines=True)
    for p in patches.patches:
        files = "\n".join(f"{f.path}{' (new)' if f.is_new else ''}" for f in p.files)
        added, removed = sum(f.added for f in p.files), sum(f.removed for f in p.files)
        table.add_row(
            f"{p.number} {p.subject}",
            p.feature,
            p.upstream_status,
            files,
            str(added),
            str(removed),
            ", ".join(graph[p.number]) or "–",
            "\n".join(p.guards),
        )
    console.out.print(table)
    console.note(f"digest {applied.digest}, base {applied.base}")


def _lint(options: argparse.Namespace) -> None:
    problems = lint.check(options.patches.resolve())
    if options.json:
        console.result([{"path": str(p.path), "line": p.line, "text": p.text} for p in problems])
    if problems:
        listed = "\n".join(str(p).removeprefix(f"{layout.ROOT}/") for p in problems)
        raise SeriesError(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the series:\n{listed}")
    console.done("The series is well-formed.")


def _guards(options: argparse.Namespace) -> None:
    with clone.view(options.source) as (patches, applied):
        outcomes = guards.run(patches, applied, compiling.compile_alone)
    if options.json:
        console.result([{**asdict(o), "guard": str(o.guard), "discriminates": o.discriminates} for o in outcomes])
    else:
        table = Table("patch", "guard", "without", "with", "whole series")
        for o in outcomes:
            table.add_row(o.patch.partition("-")[0], str(o.guard), *("passes" if passed else "fails" for passed in (o.before, o.after, o.whole)))
        console.out.print(table)
    guards.require(outcomes)
    console.done(f"{len(outcomes)} guards of {len(patches.patches)} patches fail without their patch and pass with it.")


def _forecast(options: argparse.Namespace) -> None:
    if options.markdown and options.json:
        raise UsageError("--markdown and --json: choose one.")
    loaded, patches = matrix.load(layout.MATRIX), model.read(layout.PATCHES)
    checkout = upstream.pinned(loaded.upstream, options.source)
    asked = options.versions or list(loaded.releases)
    git = Repository(layout.UPSTREAM, UpstreamError)
    has_git = git.is_top_level()
    found: dict[str, list[Move]] = {}
    to_try = [releases.find(loaded, name, layout.UPSTREAM, layout.cache("sdist"), options.source) for name in asked]
    for release in {r.name: r for r in to_try}.values():  # 'latest' may be one that was named
        console.step(f"Forecast for {release.name} ({release.how})")
        found[release.name] = forecast.run_forecast(layout.BUILD / "tmp", patches, loaded.upstream, checkout, release, git if has_git else None)
    if options.json:
        as_data = {n: [{"patch": m.patch, "outcome": m.outcome.value, "evidence": m.evidence} for m in moves] for n, moves in found.items()}
        console.result({"from": loaded.upstream.version, "releases": as_data})
    elif options.markdown:
        console.out.print(_markdown(patches, found), markup=False)
    else:
        table = Table("patch", *found)
        for i, p in enumerate(patches.patches):
            table.add_row(f"{p.number} {p.subject}", *(moves[i].outcome.value for moves in found.values()))
        console.out.print(table)
        for name, moves in found.items():
            for m in moves:
                for line in m.evidence:
                    console.note(f"{name}, {m.patch.partition('-')[0]}: {line}")


def _markdown(patches: model.Series, found: dict[str, list[Move]]) -> str:
    lines = ["| patch | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for i, p in enumerate(patches.patches):
        cells = [moves[i].outcome.value + "".join(f"<br>{line}" for line in moves[i].evidence) for moves in found.values()]
        lines.append(f"| {p.number} {p.subject} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rebase(options: argparse.Namespace) -> None:
    rebase = Rebase(layout.ROOT, layout.BUILD / "rebase", compiling.compile_alone)
    chosen = [bool(options.version), options.proceed, options.skip, options.abort]
    if sum(chosen) != 1:
        raise UsageError("say one of: VERSION (2.8.3.post2, a tag, a commit, or latest), --continue, --skip, --abort.")
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
    if stake := tree.unsaved(layout.SOURCE):
        raise SeriesError(f"{stake}. Export it first (nox -s export), or throw it away (nox -s apply -- --reset).")
    loaded, patches = matrix.load(layout.MATRIX), model.read(layout.PATCHES)
    checkout = upstream.pinned(loaded.upstream, options.source)
    release = releases.find(loaded, options.version, layout.UPSTREAM, layout.cache("sdist"), options.source)
    console.step(f"Rebase from {loaded.upstream.version} to {release.name} ({release.how})")
    return rebase.start(loaded, patches, checkout, release)


def _tell(report: Report) -> None:
    console.step(f"Rebased from {report.old} to {report.new}")
    for done in report.done:
        console.note(f"{done.patch}: {f'skipped: {done.reason}' if done.reason else done.outcome}")
        for line in done.evidence:
            console.note(f"    {line}")
    console.step("What changed in the patches themselves (git range-diff, old against new)")
    for line in report.range_diff.splitlines():
        console.note(line)
    console.note(f"patches/: {_files(report) or 'no byte differs'}; wheel_matrix.toml and CHANGES.md name {report.new}")
    console.note(report.submodule)
    console.step("Next")
    if report.kernels:
        console.note(f"{len(report.kernels)} kernel files may differ: nox -s build -- --kernels {report.kernel_words}")
    else:
        console.note("no kernel file differs")
    console.note("to take it back: git restore --staged --worktree patches wheel_matrix.toml CHANGES.md upstream; git clean -f patches")
    console.note(
        "nox -s build; nox -s tests; nox -s verify, on a machine with a GPU; then git add patches wheel_matrix.toml CHANGES.md upstream, and git commit"
    )
    console.done(f"The series stands on {report.new}.")


def _each(options: argparse.Namespace) -> None:
    with clone.view(options.source) as (patches, applied):
        runs = prefixes.each(patches, applied, options.run_command, layout.BUILD / "tmp")
    if options.json:
        console.result([asdict(r) for r in runs])
    if failed := next((r for r in runs if not r.passed and r.status != prefixes.UNTESTABLE), None):
        what = "upstream itself, without any patch" if failed is runs[0] else failed.patch
        raise SeriesError(f"it fails on {what} (status {failed.status}).")
    if untested := [r.patch for r in runs if not r.passed]:
        raise SeriesError(f"it could not be tested (125) on {', '.join(untested)}; it passes on the other {len(runs) - len(untested)}.")
    console.done(f"It passes on upstream and after every one of the {len(patches.patches)} patches.")


def _bisect(options: argparse.Namespace) -> None:
    with clone.view(options.source) as (patches, applied):
        first, runs = prefixes.bisect(patches, applied, options.run_command, layout.BUILD / "tmp")
    if options.json:
        console.result({"first_failing": first, "runs": [asdict(r) for r in runs]})
    if first is None:
        console.done("It passes on the whole series; nothing to look for.")
    else:
        raise SeriesError(f"{first} is the first patch with which it fails.")


def _changes(options: argparse.Namespace) -> None:
    text = changes.render(matrix.load(layout.MATRIX), model.read(layout.PATCHES))
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


def _timings(options: argparse.Namespace) -> None:
    loaded, patches = matrix.load(layout.MATRIX), model.read(layout.PATCHES)
    checkout = upstream.pinned(loaded.upstream, options.source)
    newest = max((v for v in loaded.releases if v != loaded.upstream.version), key=Version)
    release = releases.find(loaded, newest, layout.UPSTREAM, layout.cache("sdist"), options.source)
    measured = series_times.measure(patches, loaded.upstream, checkout, release, layout.BUILD / "tmp")
    if options.json:
        console.result([asdict(m) for m in measured])
        return
    table = Table("what", "seconds, median of 3")
    for m in measured:
        table.add_row(m.what, "not installed" if m.seconds is None else f"{m.seconds:.2f}")
    console.out.print(table)


def add_commands(commands: Any) -> None:
    """The sub-parsers; each sets ``run``."""

    def add(name: str, run: Callable[[argparse.Namespace], None], text: str, more: str = "", *, needs_source: bool = True) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}".strip())
        parser.set_defaults(run=run, interrupted="interrupted; nothing was changed.")
        parser.add_argument("--json", action="store_true", help="print one JSON document on stdout; what is read by people goes to stderr")
        if needs_source:
            arguments.add_source(parser)
        return parser

    one = add("apply", _apply, "apply the series to upstream in build/source, as commits", "Exact: no fuzz, no offset.")
    one.add_argument("--to", metavar="PATCH", help="stop after this patch (a number, a file name, or a part of one)")
    one.add_argument(
        "--reset", action="store_true", help="replace whatever build/source holds (what a tree that apply made had besides stays under refs/replaced)"
    )

    one = add("export", _export, "write the commits of build/source back to patches/", needs_source=False)
    one.add_argument("--check", action="store_true", help="write nothing; fail where patches/ is not what build/source says")

    one = add("patches", _patches, "list the patches: what each is for, touches and guards, and which others it needs")
    one.add_argument(
        "patch",
        metavar="PATCH",
        nargs="?",
        help="of this one: which lines of upstream's it touches, which kernel files and wheels it reaches, which tests",
    )
    one = add("lint", _lint, "check headers, trailers, series file, paths and whitespace of the patches", needs_source=False)
    one.add_argument("patches", metavar="FOLDER", nargs="?", type=Path, default=layout.PATCHES, help="default: patches/")
    add("guards", _guards, "run each patch's guard on the tree without it, which must fail, and with it, which must pass")

    one = add(
        "forecast",
        _forecast,
        "say what becomes of each patch on other releases of upstream",
        "Changes nothing. Outcomes: " + ", ".join(move.Outcome) + ".",
    )
    one.add_argument("versions", metavar="VERSION", nargs="*", help="a release, tag, commit or 'latest' (default: [releases] of wheel_matrix.toml)")
    one.add_argument("--markdown", action="store_true", help="print a Markdown table (not with --json)")

    one = add("rebase", _rebase, "move the series to another release of upstream", "Stops where a person must look, and says what to do next.")
    one.set_defaults(interrupted="interrupted; nox -s rebase -- --continue goes on, --abort drops it.")
    one.add_argument("version", metavar="VERSION", nargs="?", help="a release, a tag, a commit (of the submodule), or 'latest'")
    one.add_argument("--continue", dest="proceed", action="store_true", help="go on after a conflict was resolved, or after a run that was killed")
    one.add_argument("--skip", action="store_true", help="leave the patch out that stopped the rebase")
    one.add_argument("--reason", metavar="WHY", default="", help="with --skip: why; recorded in patches/series")
    one.add_argument("--abort", action="store_true", help="drop the rebase; nothing has changed")

    for name, run, text in (
        ("each", _each, "run a command on upstream and after every patch"),
        ("bisect", _bisect, "find the first patch with which a command fails"),
    ):
        one = add(name, run, text, "The command runs in the work tree, with FA2_PATCH and FA2_SOURCE set; status 125: cannot be tested.")
        one.add_argument("--run", dest="run_command", metavar="CMD", type=_command, required=True, help="a shell command")

    add("timings", _timings, "time these commands beside git am and quilt")
    one = add("changes", _changes, "render CHANGES.md from the patches", needs_source=False)
    one.add_argument("--check", action="store_true", help="write nothing; fail when CHANGES.md is stale")

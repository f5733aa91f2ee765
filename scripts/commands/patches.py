"""``patches``: what each patch is for and needs; of one, what it touches and reaches."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from scripts.base import console, layout
from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.commands import arguments
from scripts.series import affected_kernels, clone, ground, landed
from scripts.source import kernel_set

if TYPE_CHECKING:
    import argparse

    from scripts.series.model import Series


_PREFIX = "csrc/flash_attn/"


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(commands, "patches")
    parser.add_argument(
        "patch",
        metavar="PATCH",
        nargs="?",
        help="of this one: which lines of upstream's it touches, which kernel files and wheels it reaches, "
        "which tests",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.patch:
        _reach(options)
        return
    loaded = arguments.chosen(options)
    prefix = f"{loaded.upstream.package}/" if loaded.upstream.package else _PREFIX
    with clone.view(loaded, options.source) as (patches, applied):
        repository = Repository(applied.root, SeriesError)
        commits = repository.commits(applied.base, applied.commit)
        numbers = {commit: patch.number for commit, patch in zip(commits, patches.patches, strict=True)}
        graph = {
            numbers[c]: sorted(numbers[n] for n in needed)
            for c, needed in landed.needs(repository, commits).items()
        }
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
                        "needs": [patches.patches[number - 1].name for number in graph[p.number]],
                        "files": [asdict(f) for f in p.files],
                    }
                    for p in patches.patches
                ],
            }
        )
        return
    console.out.print(_table(patches, graph, prefix))
    console.note(
        f"files are under {prefix}, or where they name a folder; nox -s patches -- PATCH has the guards"
    )
    console.note(f"digest {applied.digest}, base {applied.base}")


def _table(patches: Series, graph: dict[int, list[int]], prefix: str = _PREFIX) -> Table:
    """A row a patch, which 80 columns hold without cutting a name."""
    table = Table(show_lines=True)
    for column in ("patch", "files", "lines", "needs"):
        table.add_column(column, overflow="fold")
    for p in patches.patches:
        names = (f"{f.path.removeprefix(prefix)}{' (new)' if f.is_new else ''}" for f in p.files)
        added, removed = sum(f.added for f in p.files), sum(f.removed for f in p.files)
        table.add_row(
            f"{p.number} {p.subject}\n{p.feature}, {p.upstream_status.partition(' ')[0]}",
            "\n".join(names),
            f"+{added} −{removed}",
            ", ".join(map(str, graph[p.number])) or "–",
        )
    return table


def _reach(options: argparse.Namespace) -> None:
    """Of one patch: what it touches, and what comes out otherwise with it."""
    loaded = arguments.chosen(options)
    with clone.view(loaded, options.source) as (patches, applied):
        place = patches.named(options.patch)
        patch = patches.patches[place]
        repository = Repository(applied.root, SeriesError)
        commit = repository.commits(applied.base, applied.commit)[place]
        base = ground.upstream_of(repository, applied.base)
        reached = affected_kernels.reach(repository, base, commit, patch, layout.ROOT)
    words = ",".join(kernel_set.spell_kernels(reached.kernels)) if reached.kernels else ""
    by_target = {
        target.name: [k.name for k in target.kernels if k in reached.kernels] for target in loaded.targets
    }
    if options.json:
        console.result(
            {
                "patch": patch.name,
                **asdict(reached),
                "kernels": [k.name for k in reached.kernels],
                "kernel_words": words,
                "targets": by_target,
            }
        )
        return
    table = Table("what", f"{patch.number} {patch.subject}", show_lines=True)
    table.add_row(f"upstream {loaded.upstream.version}", "\n".join(reached.upstream) or "none of its lines")
    table.add_row("files of ours", "\n".join(reached.own) or "–")
    if loaded.table.kind == "cuda":
        _compiled_rows(table, reached, words, by_target)
    table.add_row("Upstream-Status", escape(patch.upstream_status))
    table.add_row("guards", escape("\n".join(patch.guards)))
    table.add_row("tests", "\n".join(reached.tests) or "none named by its guards or message")
    console.out.print(table)


def _compiled_rows(
    table: Table, reached: affected_kernels.Reach, words: str, by_target: dict[str, list[str]]
) -> None:
    """Of a compiled upstream: which kernel files and wheels come out otherwise."""
    count = f"{len(reached.kernels)} of {len(kernel_set.ALL_KERNELS)}"
    table.add_row(
        "kernel files",
        f"{count}, by what they include (--kernels {words}); nox -s compare tells which kernels"
        if words
        else f"{count} include it",
    )
    compiled = [f"{name}: {len(names)} kernel files" for name, names in by_target.items() if names]
    table.add_row(
        "wheels",
        "\n".join(
            compiled
            or [
                f"all {len(by_target)} targets, their binding or Python files alone"
                if reached.binding
                else "none"
            ]
        ),
    )

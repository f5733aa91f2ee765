"""``patches``: what each patch is for and needs; of one, or of a file, what it touches and reaches."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from scripts.base import console, layout
from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.commands import arguments
from scripts.series import affected_kernels, clone, features, file_reach, ground, places
from scripts.series.upstream import landed
from scripts.source import kernel_set

if TYPE_CHECKING:
    import argparse

    from scripts.series.features import Features
    from scripts.series.model import Series
    from scripts.series.tree import Tree
    from scripts.source.matrix import Matrix


_PREFIX = "csrc/flash_attn/"


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.series_parser(commands, "patches")
    parser.add_argument(
        "patch",
        metavar="PATCH|FILE",
        nargs="?",
        help="of this patch: which lines of upstream's it touches, which kernel files and wheels it reaches, "
        "which tests; of this file, in fork/ or of the tree: its feature, the patches that touch or call it, "
        "which kernel files, which tests",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.patch:
        _of_one(options)
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


def _of_one(options: argparse.Namespace) -> None:
    """Of one patch, or of one file."""
    loaded, file = _file_of(options)
    with clone.view(loaded, options.source) as (patches, applied):
        repository = Repository(applied.root, SeriesError)
        there = repository.files(applied.commit)
        ends = [name for name in there if name.endswith(f"/{file}")]  # a file's name alone
        if file in there or len(ends) == 1:
            file = file if file in there else ends[0]
            told = features.read(places.of(loaded).own)
            found = file_reach.find(repository, applied.commit, file, patches, told, layout.ROOT)
            _tell_file(found, loaded, patches, told, as_json=options.json)
        elif len(ends) > 1:
            raise SeriesError(f"{file} is {', '.join(ends)} in the tree; name one of them.")
        elif "/" not in options.patch or options.patch.endswith(".patch"):
            _reach(loaded, patches, applied, options)
        else:
            raise SeriesError(
                f"{options.patch} is no file of fork/, none of {loaded.name}'s tree (--upstream chooses "
                "another's), and no patch, which nox -s patches lists."
            )


def _file_of(options: argparse.Namespace) -> tuple[Matrix, str]:
    """The upstream whose tree a file is of, and its path there, should a user mean a file.

    Raises:
        SeriesError: it lies in the folder of another upstream than --upstream names.
    """
    chosen = arguments.chosen(options)
    path = os.path.relpath(options.patch, layout.ROOT) if Path(options.patch).is_absolute() else options.patch
    path = os.path.normpath(path)
    for loaded in chosen.each():
        place = places.of(loaded)
        for folder in filter(None, (place.own, place.source)):
            beginning = f"{folder.relative_to(layout.ROOT).as_posix()}/"
            if not path.startswith(beginning):
                continue
            if options.upstream not in (None, loaded.name):
                raise SeriesError(
                    f"{options.patch} is {loaded.name}'s, and --upstream says {options.upstream}."
                )
            return loaded, path.removeprefix(beginning)
    return chosen, path


def _tell_file(
    found: file_reach.FileReach, loaded: Matrix, patches: Series, told: Features | None, *, as_json: bool
) -> None:
    """Of one file: what it is for."""
    words = ",".join(kernel_set.spell_kernels(found.kernels)) if found.kernels else ""
    if as_json:
        facts = {**asdict(found), "upstream": loaded.name, "kernels": [k.name for k in found.kernels]}
        console.result({**facts, "kernel_words": words})
        return
    titles = [
        f"{name}: {told.entries[name].title}" if told and name in told.entries else name
        for name in found.features
    ]
    numbers = {patch.name: f"{patch.number} {patch.subject}" for patch in patches.patches}
    hooks = [numbers[h.patch] + (f" (through {h.through})" if h.through else "") for h in found.patches]
    table = Table("what", found.path, show_lines=True)
    table.add_row("whose", "ours" if found.ours else f"upstream's, {loaded.upstream.version}")
    table.add_row("feature" if found.ours else "features of its patches", "\n".join(titles) or "none")
    table.add_row(
        "patches that call it" if found.ours else "patches that touch it", "\n".join(hooks) or "none"
    )
    if loaded.table.kind == "cuda":
        count = f"{len(found.kernels)} of {len(kernel_set.ALL_KERNELS)} include it"
        table.add_row("kernel files", f"{count} (--kernels {words})" if words else count)
    table.add_row("tests", "\n".join(found.tests) or "none named")
    console.out.print(table)


def _reach(loaded: Matrix, patches: Series, applied: Tree, options: argparse.Namespace) -> None:
    """Of one patch: what it touches, and what comes out otherwise with it."""
    place = patches.named(options.patch)
    patch = patches.patches[place]
    repository = Repository(applied.root, SeriesError)
    commit = repository.commits(applied.base, applied.commit)[place]
    base = ground.upstream_of(repository, applied.base)
    reached = affected_kernels.reach(repository, base, commit, patch, layout.ROOT, patches.own.contents)
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

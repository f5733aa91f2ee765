"""What a rebase says and asks of upstream's own changes, which no merge shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.base import console
from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series.upstream import changes as upstream_changes
from scripts.series.upstream import words as upstream_words
from scripts.source import kernel_set

if TYPE_CHECKING:
    from scripts.series.rebase.folder import Folder
    from scripts.series.rebase.state import State
    from scripts.series.upstream.report import UpstreamChanges


def changes(folder: Folder, state: State) -> UpstreamChanges:
    """What upstream changed between the two releases."""
    git = Repository(folder.root / "upstream", SeriesError)
    between = upstream_changes.between(git, state.old_pin, state.new_pin)
    package = state.new_pin.package
    return upstream_changes.compare(folder.space(state), list(state.patches), between, package)


def tell(folder: Folder, state: State) -> None:
    """Say it, before the first patch is moved."""
    if lines := upstream_words.lines(changes(folder, state), list(state.patches), state.new_pin.package):
        console.step(f"What upstream changed in {state.new_pin.version}, whether a patch conflicts or not")
        for line in lines:
            console.note(line)


def unknown_kernels(folder: Folder, state: State) -> list[str]:
    """Why the rebase may not end: kernel files that the table does not know, or has and upstream dropped."""
    repository, source = folder.repository, f"{kernel_set.FOLDER}/"
    old, new, moved = (set(repository.files(c, source)) for c in (state.old_base, state.new_base, "HEAD"))
    problems = []
    if names := kernel_set.unknown(sorted(new & moved)):
        problems.append(f"{len(names)} kernel files of {state.new_pin.version} are in no wheel: {names[0]} …")
        problems += kernel_set.how_to_know(names).splitlines()
    if names := kernel_set.missing(old, moved):
        problems.append(
            f"{len(names)} kernel files are gone in {state.new_pin.version}: {names[0]} …; "
            "take their head dim, dtype or pass out of scripts/source/kernel_set.py"
        )
    return problems

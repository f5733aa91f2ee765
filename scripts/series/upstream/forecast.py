"""What would become of each patch on another release, without stopping at one that does not move."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console
from scripts.series.upstream import landed, move, changes as upstream_changes
from scripts.series.upstream.move import Move, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.base.git import Repository
    from scripts.series.model import Patch, Series
    from scripts.series.upstream.move import Workspace
    from scripts.series.upstream.report import UpstreamChanges
    from scripts.source.matrix_tables import Upstream
    from scripts.source.releases import Release
    from scripts.source.upstream import Checkout


@dataclass(frozen=True)
class Forecast:
    """What would become of the patches on one release, and what else is new there."""

    moves: list[Move]
    upstream: UpstreamChanges


def forecast(
    space: Workspace, patches: Sequence[Patch], git: tuple[Repository, str, str] | None = None
) -> list[Move]:
    """What would become of each patch. Goes on past one that does not move, where later ones do not need it.

    Args:
        space: from :func:`scripts.series.upstream.move.workspace`; its HEAD moves.
        patches: of the series.
        git: upstream's repository with the old and the new commit, where there is one, for patch-ids.
    """
    repository, commits = space.repository, space.commits
    graph = landed.needs(repository, commits)
    names = {commit: patch.name for commit, patch in zip(commits, patches, strict=True)}
    there = landed.landed(space, patches)
    ids = landed.landed_in(git[0], space, git[1], git[2]) if git else {}
    moves: list[Move] = []
    stuck: set[str] = set()
    with console.steps("patches", len(commits)) as advance:
        for commit in commits:
            name = names[commit]
            advance(name)
            outcome, evidence = there.get(name, (None, ""))
            if commit in ids:
                moves.append(
                    Move(
                        name,
                        Outcome.LANDED_IDENTICAL,
                        (f"upstream's commit {ids[commit]} has the same patch-id",),
                    )
                )
                continue
            if outcome is Outcome.LANDED_IDENTICAL:
                moves.append(Move(name, outcome, (evidence,)))
                continue
            if blockers := sorted(names[c].removesuffix(".patch") for c in graph[commit] & stuck):
                stuck.add(commit)
                moves.append(Move(name, Outcome.NOT_TRIED, (f"it needs {', '.join(blockers)}",)))
                continue
            step = move.pick(space, commit)
            moves.append(move.judge(name, step, there.get(name)))
            if repository.attempt("rev-parse", "--verify", "--quiet", "CHERRY_PICK_HEAD")[0] == 0:
                stuck.add(commit)
                move.abandon(space)
    return moves


def run_forecast(
    folder: Path,
    series: Series,
    pin: Upstream,
    checkout: Checkout,
    release: Release,
    git: Repository | None = None,
) -> Forecast:
    """Forecast in a temporary work tree under ``folder``, which is left as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix="forecast-"))
    try:
        space = move.workspace(temporary / "source", series, pin, checkout, release)
        between = upstream_changes.between(git, pin, release.pin)
        changes = upstream_changes.compare(space, [p.name for p in series.patches], between, pin.package)
        return Forecast(forecast(space, series.patches, between), changes)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

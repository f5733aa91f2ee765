"""The series as a git branch that people push, fetch and open pull requests from.

It is upstream's commit, then our own files in one commit, then a commit a patch; or one patch on upstream's
commit. Its ids follow from upstream's commit, our files and the patches. No file of a work tree changes.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base.errors import SeriesError
from scripts.series import ground, restack
from scripts.series import own as own_files
from scripts.series.kept_commits import PUBLISHED, published
from scripts.series.upstream import landed

if TYPE_CHECKING:
    from scripts.base.git import Repository
    from scripts.series.model import Series
    from scripts.series.tree import Tree
    from scripts.source.matrix_tables import Upstream


@dataclass(frozen=True)
class Asked:
    """What branch is to be made."""

    name: str
    patch: str | None = None  # of this one alone, as ``Series.named`` takes it
    force: bool = False  # whatever commits it has


@dataclass(frozen=True)
class Branch:
    """A branch that was made."""

    name: str
    commit: str
    upstream: str  # the commit that it stands on
    commits: int  # on that
    changed: bool  # whether it was not so before


def make(
    repository: Repository,
    series: Series,
    applied: Tree,
    asked: Asked,
    submodule: Path | None,
    pin: Upstream,
) -> Branch:
    """Make the branch in the repository of a work tree.

    Args:
        repository: of the work tree.
        series: as this clone has it.
        applied: a tree of it, there or elsewhere.
        asked: the branch.
        submodule: where upstream's own commit is; None: the branch stands on the tree's.
        pin: the release.

    Raises:
        SeriesError: the branch cannot be made; see :func:`whole`, :func:`alone` and :func:`set_branch`.
    """
    place = None if asked.patch is None else series.named(asked.patch)
    _require_name(repository, asked.name)
    if applied.root.resolve() != repository.root:
        repository.run("fetch", "--quiet", "--no-tags", str(applied.root), applied.commit)
    if submodule:
        options = ("--quiet", "--no-tags", "--update-shallow")
        repository.run("fetch", *options, str(submodule.resolve()), pin.commit)
        theirs = pin.commit
    else:
        theirs = ground.upstream_of(repository, applied.base)
    if place is None:
        commit, count = whole(repository, series, applied, theirs, pin.package)
    else:
        commit, count = alone(repository, series, applied, theirs, place), 1
    changed = set_branch(repository, asked.name, commit, force=asked.force)
    return Branch(asked.name, commit, theirs, count, changed)


def whole(
    repository: Repository, series: Series, applied: Tree, upstream: str, package: str | None = None
) -> tuple[str, int]:
    """Write our own files and the patches on upstream's commit: the last commit, and how many there are.

    Args:
        repository: in which the tree's commits and upstream's are.
        series: what the tree was applied from.
        applied: the tree.
        upstream: a commit of the same release.
        package: of a python upstream, its folder.

    Raises:
        SeriesError: it has a file of ours, or other content in a file that a patch changes.
    """
    stack = restack.layers(repository, applied.base, applied.commit)
    _require_same(repository, applied, upstream, stack)
    like = ground.upstream_of(repository, applied.base)
    own_files.require_no_others(series.own, repository.files(upstream), package)
    _, tip = restack.write(repository, upstream, series.own.contents, stack, like)
    return tip, len(stack) + bool(series.own.contents)


def _require_same(repository: Repository, applied: Tree, upstream: str, stack: list[restack.Layer]) -> None:
    """Refuse a commit whose files are not those that the patches are for."""
    paths = sorted({change.path.decode() for layer in stack for change in layer.changes})
    ours = ground.upstream_of(repository, applied.base)
    before, there = (
        repository.run("ls-tree", "-r", "-z", commit, "--", *paths, writes=False)
        for commit in (ours, upstream)
    )
    if paths and before != there:
        named = {line.partition("\t")[2] for line in {*before.split("\0")} ^ {*there.split("\0")}}
        raise SeriesError(
            f"upstream's commit {upstream[:12]} has other content than the files that the series stands on: "
            f"{', '.join(sorted(filter(None, named)))}."
        )


def alone(repository: Repository, series: Series, applied: Tree, upstream: str, place: int) -> str:
    """Write one patch on upstream's bare commit: the commit.

    Args:
        repository: in which the tree's commits and upstream's are.
        series: what the tree was applied from.
        applied: the tree.
        upstream: a commit of the same release.
        place: the patch's, from 0.

    Raises:
        SeriesError: the patch is not one for upstream, needs our files, or does not apply there.
    """
    patch = series.patches[place]
    if not patch.upstream_status.startswith(("Pending", "Submitted")):
        raise SeriesError(
            f"{patch.name} is not for upstream: its Upstream-Status is {patch.upstream_status}. A branch of "
            "one patch takes those that are Pending or Submitted."
        )
    commits = repository.commits(applied.base, applied.commit)
    if (
        series.own.contents
        and applied.base in landed.needs(repository, [applied.base, *commits])[commits[place]]
    ):
        raise SeriesError(f"{patch.name} needs the fork's own files; upstream cannot take it as it is.")
    (layer,) = restack.layers(repository, f"{commits[place]}^", commits[place])
    picked = _picked(repository, upstream, commits[place], patch.name)
    changes = restack.layers(repository, f"{picked}^", picked)[0].changes
    return restack.write(repository, upstream, {}, [replace(layer, changes=changes)])[1]


def _picked(repository: Repository, upstream: str, commit: str, name: str) -> str:
    """A commit on another, by a merge as of ``git cherry-pick``, in a clone that goes again."""
    with tempfile.TemporaryDirectory(prefix="fa2-branch-") as folder:
        copy = repository.shared_copy(Path(folder) / "source")
        copy.run("checkout", "--quiet", "--detach", upstream)
        status, _, told = copy.attempt("cherry-pick", "--allow-empty", commit)
        if status != 0:
            unmerged = sorted(set(copy.run("diff", "--name-only", "--diff-filter=U", writes=False).split()))
            where = f"it conflicts in {', '.join(unmerged)}" if unmerged else told.strip().splitlines()[-1]
            raise SeriesError(
                f"{name} does not apply to upstream alone: {where}. It needs earlier patches; write it so "
                "that it stands on upstream, and move it to the front of the series."
            )
        repository.run("fetch", "--quiet", "--no-tags", str(copy.root), "HEAD")
        return copy.resolve("HEAD")


def _require_name(repository: Repository, name: str) -> None:
    if repository.attempt("check-ref-format", "--branch", name)[0] != 0 or name in ("HEAD", "@"):
        raise SeriesError(f"{name!r} is no name for a branch.")
    if repository.attempt("show-ref", "--quiet", "--verify", f"refs/tags/{name}")[0] == 0:
        raise SeriesError(f"{name} is a tag of the tree, and git push would stop at two; take another name.")
    worktrees = repository.run("worktree", "list", "--porcelain", writes=False).splitlines()
    if f"branch refs/heads/{name}" in worktrees:
        raise SeriesError(f"the branch {name} is checked out in {repository.root}; take another name.")


def set_branch(repository: Repository, name: str, commit: str, *, force: bool = False) -> bool:
    """Make a branch hold a commit; whether it did not before.

    Raises:
        SeriesError: it has commits that the new one lacks, or another branch is in its way.
    """
    ref = f"refs/heads/{name}"
    status, known, _ = repository.attempt("rev-parse", "--verify", "--quiet", ref)
    known = known.strip() if status == 0 else ""
    if known and known != commit and not force:
        ahead = repository.run("log", "--format=    %h %s", known, f"^{commit}", "-5", writes=False)
        if ahead:
            raise SeriesError(
                f"the branch {name} in {repository.root} has commits that the new one lacks:\n{ahead}\n"
                "--force replaces it; or take another name."
            )
    _forget_deleted(repository)
    noted = f"{PUBLISHED}/{name}"  # first: commits of a branch that is not noted would be somebody's work
    for options in ((noted, commit), ("-m", "export: the series", ref, commit, known or "0" * 40)):
        status, _, told = repository.attempt("update-ref", *options)
        if status != 0:
            raise SeriesError(
                f"the branch {name} cannot be made: {told.strip().splitlines()[-1]}. Take another name."
            )
    return known != commit


def _forget_deleted(repository: Repository) -> None:
    """Drop the notes of branches that somebody deleted: their names may be in a new one's way."""
    for name in published(repository):
        if repository.attempt("show-ref", "--quiet", "--verify", f"refs/heads/{name}")[0] != 0:
            repository.run("update-ref", "-d", f"{PUBLISHED}/{name}")

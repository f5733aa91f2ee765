"""Move patches to another base, one at a time, with git's merge backend; say what became of each and why.

A cherry-pick is the step of ``git rebase --onto``: a merge of whole files whose common ancestor is the
patch's own parent. ``git am -3`` is not: where upstream has two identical blocks and removed the first, it
puts a hunk into the wrong one and reports success.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import ground, unfinished
from scripts.series import tree as work_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.series.model import Series
    from scripts.source.matrix_tables import Upstream
    from scripts.source.releases import Release
    from scripts.source.upstream import Checkout


class Outcome(str, Enum):
    """What becomes of a patch on another base."""

    CLEAN = "clean"  # applies exactly
    OFFSET = "offset"  # merges; hunks moved, or lines around them changed
    CONFLICT = "conflict"
    NOT_TRIED = "not-tried"  # it needs one that does not move
    LANDED_IDENTICAL = (
        "landed-identical"  # the whole patch reverse-applies to the new base, or its patch-id is there
    )
    LANDED_MODIFIED = "landed-modified"  # most of its hunks do
    SOURCE_RENAMED = "source-renamed"  # a file it touches has another name
    SOURCE_DELETED = "source-deleted"  # a file it touches is gone
    EMPTY = "empty"  # the merge leaves nothing, and nothing shows that upstream has it

    @property
    def meaning(self) -> str:
        """In words, for --help."""
        return {
            Outcome.CLEAN: "applies exactly",
            Outcome.OFFSET: "merges; hunks moved, or lines around them changed",
            Outcome.CONFLICT: "a person must resolve it",
            Outcome.NOT_TRIED: "needs a patch that does not move",
            Outcome.LANDED_IDENTICAL: "upstream has it",
            Outcome.LANDED_MODIFIED: "upstream has most of it",
            Outcome.SOURCE_RENAMED: "a file it touches has another name",
            Outcome.SOURCE_DELETED: "a file it touches is gone",
            Outcome.EMPTY: "the merge leaves nothing, and nothing shows that upstream has it",
        }[self]

    @property
    def moves(self) -> bool:
        """Whether the patch needs nobody."""
        return self in (Outcome.CLEAN, Outcome.OFFSET)


@dataclass(frozen=True)
class Move:
    """A patch on the new base."""

    patch: str
    outcome: Outcome
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Workspace:
    """One repository with the series on its base, and the new base beside it."""

    repository: Repository
    old_base: str
    tip: str
    new_base: str
    new_name: str

    @property
    def upstream(self) -> str:
        """The commit of the old release's files alone."""
        return ground.upstream_of(self.repository, self.old_base)

    @property
    def commits(self) -> list[str]:
        """The series, oldest first."""
        return self.repository.commits(self.old_base, self.tip)


def workspace(folder: Path, series: Series, pin: Upstream, checkout: Checkout, release: Release) -> Workspace:
    """Make ``folder`` a repository in which the series can move from the pin to a release.

    HEAD is the new base.
    """
    applied = work_tree.apply(series, pin, checkout, folder)
    repository = Repository(folder, SeriesError)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name + ".") as temporary:
        fresh = Path(temporary) / "base"
        new_base = ground.make_base(fresh, release.pin, release.checkout, series.own)
        repository.run("fetch", "--quiet", "--no-tags", str(fresh), "HEAD")
    repository.run("update-ref", "refs/series/new-base", new_base)
    repository.run("update-ref", "refs/series/backup", applied.commit)
    repository.run("checkout", "--quiet", "--detach", new_base)
    return Workspace(repository, applied.base, applied.commit, new_base, release.name)


# --- one step ---


@dataclass(frozen=True)
class Step:
    """What one cherry-pick gave; after a conflict the work tree holds it."""

    outcome: Outcome
    evidence: tuple[str, ...]


def pick(space: Workspace, commit: str) -> Step:
    """Put one commit of the series on HEAD. Left in the middle of the cherry-pick after a conflict."""
    repository = space.repository
    exact = _offsets(repository, commit)
    renamed, deleted = _gone(space, commit)
    status, out, err = repository.attempt("cherry-pick", "--allow-empty-message", commit)
    if status == 0:
        if renamed:
            return Step(Outcome.SOURCE_RENAMED, tuple(renamed))
        return Step(Outcome.CLEAN, ()) if not exact else Step(Outcome.OFFSET, tuple(exact))
    conflicts = [
        name
        for name in repository.run("diff", "--name-only", "--diff-filter=U", "-z", writes=False).split("\0")
        if name
    ]
    if conflicts:
        evidence = [line for name in conflicts for line in _conflict(space, name)]
        if deleted:
            return Step(Outcome.SOURCE_DELETED, (*deleted, *evidence))
        return (
            Step(Outcome.SOURCE_RENAMED, (*renamed, *evidence))
            if renamed
            else Step(Outcome.CONFLICT, tuple(evidence))
        )
    is_clean = not repository.run("status", "--porcelain", "--untracked-files=no", writes=False).strip()
    if is_clean and unfinished.is_picking(repository.root):  # else it did not begin: a full disk, a lock
        return Step(Outcome.EMPTY, (f"merging it into {space.new_name} leaves nothing",))
    raise SeriesError(f"git cherry-pick {commit} in {repository.root} exited with {status}:\n{err or out}")


def _counted(lines: int) -> str:
    """A distance in lines.

    >>> _counted(1), _counted(-2)
    ('1 line', '-2 lines')
    """
    return f"{lines} line{'' if abs(lines) == 1 else 's'}"


def summary(evidence: Sequence[str]) -> tuple[str, ...]:
    """The same for people: hunks that moved are counted.

    >>> summary(["a.h:7: hunk 1 moved by 2 lines", "a.h:9: hunk 2 moved by 2 lines", "b.h:1: conflict"])
    ('b.h:1: conflict', '2 hunks moved by 2 lines')
    >>> summary(["a.h:7: hunk 1 moved by 1 line", "a.h:9: hunk 2 moved by -4 lines"])
    ('2 hunks moved by -4 to 1 lines',)
    """
    moved = [int(m[1]) for line in evidence if (m := re.search(r": hunk \d+ moved by (-?\d+) lines?$", line))]
    rest = [line for line in evidence if not re.search(r": hunk \d+ moved by -?\d+ lines?$", line)]
    if not moved:
        return tuple(rest)
    least, most = min(moved), max(moved)
    distance = _counted(least) if least == most else f"{least} to {most} lines"
    return (*rest, f"{len(moved)} hunk{'' if len(moved) == 1 else 's'} moved by {distance}")


def _offsets(repository: Repository, commit: str) -> list[str]:
    """Why a commit's diff does not apply exactly to HEAD; empty when it does."""
    with tempfile.TemporaryDirectory(prefix="fa2-exact-") as folder:
        path = Path(folder) / "diff"
        path.write_bytes(repository.diff_of(commit))
        status, report = work_tree.try_patch(repository, path)
    file, lines = "", []
    for line in report.splitlines():
        if match := re.match(r"Checking patch (\S+?)(?: =>.*)?\.\.\.", line):
            file = match[1]
        elif match := re.match(r"Hunk #(\d+) succeeded at (\d+) \(offset (-?\d+) lines?\)", line):
            lines.append(f"{file}:{match[2]}: hunk {match[1]} moved by {_counted(int(match[3]))}")
        elif match := re.match(r"error: patch failed: (\S+):(\d+)", line):
            lines.append(f"{match[1]}:{match[2]}: the lines around a change are others; merged")
    return lines or (["it does not apply as it is; merged"] if status else [])


def _gone(space: Workspace, commit: str) -> tuple[list[str], list[str]]:
    """Files a commit changes that the new base has under another name, or not at all."""
    repository = space.repository
    touched = set(
        repository.run(
            "diff-tree", "--no-commit-id", "-r", "--name-only", "--diff-filter=MD", commit, writes=False
        ).split("\n")
    ) - {""}
    if not touched:
        return [], []
    there, first = (set(repository.files(base, "--", *touched)) for base in (space.new_base, space.old_base))
    missing = sorted(first - there)
    if not missing:
        return [], []
    listing = repository.run(
        "diff",
        "--find-renames=40%",
        "--diff-filter=R",
        "--name-status",
        space.old_base,
        space.new_base,
        writes=False,
    )
    names = {old: (new, score) for score, old, new in (line.split("\t") for line in listing.splitlines())}
    renamed = [
        f"{name} is {names[name][0]} in {space.new_name} ({int(names[name][1][1:])} % the same)"
        for name in missing
        if name in names
    ]
    return renamed, [f"{name} is not in {space.new_name}" for name in missing if name not in names]


def _conflict(space: Workspace, name: str) -> list[str]:
    """Where a file conflicts, and what upstream did there."""
    path = space.repository.root / name
    if not path.is_file():
        return [f"{name}: changed by the patch, gone in {space.new_name}"]
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    places = [i for i, line in enumerate(lines, 1) if line.startswith("<<<<<<< ")]
    evidence = []
    for place in places:
        block = lines[place:]
        base_at = next((i for i, line in enumerate(block) if line.startswith("||||||| ")), 0)
        first = next((line.strip() for line in block[:base_at] if line.strip()), "")
        about = (
            f"; {space.new_name} has '{first if len(first) <= 100 else first[:99] + '…'}'"
            if first
            else f"; {space.new_name} removed the lines"
        )
        evidence.append(f"{name}:{place}: conflict{about}")
    return evidence or [f"{name}: conflict"]


def abandon(space: Workspace) -> None:
    """Undo a pick that did not finish."""
    space.repository.attempt("cherry-pick", "--abort")
    space.repository.discard()


def judge(name: str, step: Step, there: tuple[Outcome, str] | None) -> Move:
    """A pick's outcome in the light of what the new base was found to have."""
    if there is None:
        return Move(name, step.outcome, step.evidence)
    outcome, evidence = there
    if outcome is Outcome.LANDED_IDENTICAL or (outcome is Outcome.LANDED_MODIFIED and not step.outcome.moves):
        return Move(name, outcome, (evidence, *step.evidence))
    return Move(name, step.outcome, (*step.evidence, evidence))

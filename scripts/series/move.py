"""Move patches to another base, one at a time, with git's merge backend; say what became of each and why.

A cherry-pick is the step of ``git rebase --onto``: a merge of whole files whose common ancestor is the patch's
own parent. ``git am -3`` is not: where upstream has two identical blocks and removed the first, it puts a
hunk into the wrong one and reports success.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from unidiff.patch import PatchSet

from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import tree as work_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.series.model import Patch, Series
    from scripts.source.matrix import Upstream
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
    old_name: str
    new_name: str

    @property
    def commits(self) -> list[str]:
        """The series, oldest first."""
        return self.repository.commits(self.old_base, self.tip)


def workspace(folder: Path, series: Series, pin: Upstream, checkout: Checkout, release: Release) -> Workspace:
    """Make ``folder`` a repository in which the series can move from the pin to a release; HEAD is the new base."""
    applied = work_tree.apply(series, pin, checkout, folder)
    repository = Repository(folder, SeriesError)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name + ".") as aside:
        fresh = Path(aside) / "base"
        new_base = work_tree.make_base(fresh, release.pin, release.checkout)
        repository.run("fetch", "--quiet", "--no-tags", str(fresh), "HEAD")
    repository.run("update-ref", "refs/series/new-base", new_base)
    repository.run("update-ref", "refs/series/backup", applied.commit)
    repository.run("checkout", "--quiet", "--detach", new_base)
    return Workspace(repository, applied.base, applied.commit, new_base, pin.version, release.name)


# --- which patch needs which ---


def needs(repository: Repository, commits: Sequence[str]) -> dict[str, frozenset[str]]:
    """For each commit the earlier ones whose lines it changes or stands beside, or whose new files it includes."""
    made: dict[str, str] = {}
    found: dict[str, frozenset[str]] = {}
    for commit in commits:
        parsed = PatchSet(repository.diff_of(commit).decode("utf-8"))
        mine: set[str] = set()
        for file in parsed:
            if file.is_added_file:
                made[file.path] = commit
            else:
                ranges = [
                    f"-L{hunk.source_start},+{hunk.source_length}" for hunk in file if hunk.source_length
                ]
                if ranges:
                    blamed = repository.run(
                        "blame", "--porcelain", *ranges, f"{commit}^", "--", file.path, writes=False
                    )
                    mine |= set(re.findall(r"^([0-9a-f]{40}) \d+ \d+", blamed, re.MULTILINE))
            text = "\n".join(line.value for hunk in file for line in hunk if line.is_added)
            for path, maker in made.items():
                stem = path.rsplit("/", 1)[-1]
                module = path.removesuffix(".py").replace("/", ".")
                if f'#include "{stem}"' in text or re.search(rf"(from|import) {re.escape(module)}\b", text):
                    mine.add(maker)
        found[commit] = frozenset(mine & set(commits) - {commit})
    return found


# --- landed ---


def _patch_files(repository: Repository, commit: str, folder: Path) -> tuple[Path, list[Path]]:
    """A commit's diff as one file, and each of its substantial hunks as one."""
    whole = folder / f"{commit}.diff"
    whole.write_bytes(repository.diff_of(commit))
    hunks: list[Path] = []
    for file in PatchSet(whole.read_text(encoding="utf-8")):
        header = str(file).split("\n@@", 1)[0]
        for hunk in file:
            # A hunk that adds a brace or only removes lines would reverse-apply to many a file by chance.
            if not any(line.is_added and len(re.sub(r"\W", "", line.value)) >= 8 for line in hunk):
                continue
            path = folder / f"{commit}.{len(hunks)}.diff"
            path.write_text(f"{header}\n{hunk}", encoding="utf-8")
            hunks.append(path)
    return whole, hunks


def _reverses(repository: Repository, patch: Path) -> bool:
    status, _, _ = repository.attempt("apply", "--reverse", "--check", "--whitespace=nowarn", str(patch))
    return status == 0


def landed(space: Workspace, patches: Sequence[Patch]) -> dict[str, tuple[Outcome, str]]:
    """The patches whose changes the new base has, by reverse application from the last to the first.

    A patch that is there whole is taken out of the files before the one below it is looked for. The work tree
    is the new base's, before and after.
    """
    repository, found = space.repository, {}
    with tempfile.TemporaryDirectory(prefix="fa2-landed-") as folder:
        for commit, patch in reversed(list(zip(space.commits, patches, strict=True))):
            whole, hunks = _patch_files(repository, commit, Path(folder))
            if _reverses(repository, whole) and hunks:
                repository.run("apply", "--reverse", "--whitespace=nowarn", str(whole))
                found[patch.name] = (
                    Outcome.LANDED_IDENTICAL,
                    f"the whole patch reverse-applies to {space.new_name}",
                )
                continue
            there = sum(_reverses(repository, hunk) for hunk in hunks)
            if there:
                evidence = f"{there} of its {len(hunks)} hunks reverse-apply to {space.new_name}"
                found[patch.name] = (
                    Outcome.LANDED_MODIFIED if 2 * there > len(hunks) else Outcome.CONFLICT,
                    evidence,
                )
    repository.discard(space.new_base)
    return found


def landed_in(upstream: Repository, space: Workspace, old: str, new: str) -> dict[str, str]:
    """The series' commits whose patch-id a commit of upstream's between two commits has: series commit to upstream's."""
    wanted = {_patch_id(space.repository, commit): commit for commit in space.commits}
    touched = sorted(
        {
            name
            for c in space.commits
            for name in space.repository.run("diff-tree", "--no-commit-id", "-r", "--name-only", c).split(
                "\n"
            )
        }
    )
    found = {}
    for commit in upstream.run(
        "rev-list", "--no-merges", f"{old}..{new}", "--", *touched, writes=False
    ).split():
        if (mine := wanted.get(_patch_id(upstream, commit))) is not None:
            found[mine] = upstream.run("log", "-1", "--format=%h %s", commit, writes=False)
    return found


def _patch_id(repository: Repository, commit: str) -> str:
    with tempfile.TemporaryDirectory(prefix="fa2-id-") as folder:
        diff = Path(folder) / "diff"
        diff.write_bytes(repository.diff_of(commit))
        return repository.run("patch-id", "--stable", writes=False, stdin=diff).split(" ")[0]


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
    if not repository.run("status", "--porcelain", "--untracked-files=no", writes=False).strip():
        return Step(Outcome.EMPTY, (f"merging it into {space.new_name} leaves nothing",))
    raise SeriesError(f"git cherry-pick {commit} in {repository.root} exited with {status}:\n{err or out}")


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
            lines.append(f"{file}:{match[2]}: hunk {match[1]} moved by {match[3]} lines")
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

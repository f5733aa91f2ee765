"""The series as commits in a work tree: apply it.

One series on one base always ends in one commit id: author, committer and dates are fixed. The base is a
commit of our own files on one of upstream's files alone. Applying is exact: no fuzz, no offset. What
somebody did in the tree is never thrown away unasked.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console
from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import carry, ground, kept_commits, mail, uncommitted, unfinished
from scripts.series.marker import pin_key, read_marker, write_marker
from scripts.series.places import command

if TYPE_CHECKING:
    from scripts.series.marker import Applied
    from scripts.series.model import Series
    from scripts.source import upstream
    from scripts.source.matrix_tables import Upstream

AM = ("am", "--quiet", "--no-3way", "--committer-date-is-author-date", "--keep-cr", mail.KEEP)


@dataclass(frozen=True)
class Snapshot:
    """The files of a work tree, as they were at one moment."""

    root: Path
    seen: int = field(default_factory=time.time_ns, compare=False, kw_only=True)  # when

    def check_unchanged(self) -> None:
        """What is made of the files is kept under the ids, so it must be made of what the ids say.

        Raises:
            SeriesError: a file was written since then.
        """
        for pattern in ("*", "csrc/**/*", "flash_attn/**/*", "flash_attn_2_cuda/**/*"):
            for path in sorted(self.root.glob(pattern)):
                if path.is_file() and not path.name.startswith(".") and path.stat().st_ctime_ns > self.seen:
                    raise SeriesError(
                        f"{path} changed while it was being built from. Nothing that may be of both states "
                        "was kept; build again. (Nobody wrote it? Then the clock was set back: "
                        f"{command('apply', self.root, '--reset')})"
                    )


@dataclass(frozen=True)
class Commits(Snapshot):
    """A work tree in whose repository a series stands on its base, a commit a patch."""

    base: str
    commit: str


@dataclass(frozen=True)
class Tree(Commits):
    """A work tree with the series applied, and the ids that what is made of it is kept under."""

    digest: str
    sources: (
        str  # id of csrc: what the binding is compiled from, whatever the messages and the Python files say
    )
    kernel_sources: str  # the same of what kernel files can include: all but the binding's own files


def try_patch(repository: Repository, path: Path) -> tuple[int, str]:
    """Whether git could apply a patch to the work tree, and what it says of each hunk.

    Nothing is changed. The first is git's exit status.
    """
    status, out, err = repository.attempt("apply", "--check", "--verbose", "--whitespace=nowarn", str(path))
    return status, f"{out}\n{err}"


def _prove_exact(repository: Repository, path: Path) -> None:
    """``git am`` takes a hunk that moved; we do not: it may have moved into another function."""
    status, report = try_patch(repository, path)
    if "Skipped patch" in report:
        raise SeriesError(f"{path.name}: git skipped it: {repository.root} is inside another repository.")
    offsets = re.findall(r"^Hunk #\d+ succeeded at .*$", report, re.MULTILINE)
    if status != 0 or offsets:
        lines = [
            line
            for line in report.splitlines()
            if line.startswith(("error:", "Hunk #")) and line != "error: while searching for:"
        ]
        raise SeriesError(
            f"{path.name} does not apply exactly:\n" + "\n".join("    " + line for line in lines)
        )


def _work_at_stake(repository: Repository, applied: Applied) -> str | None:
    """What is in a tree and in no patch, in words; None when it may be replaced."""
    root = repository.root
    if told := unfinished.in_words(root):
        return told
    if changed := uncommitted.changes(repository):
        return f"{root} has changes that are in no patch:\n{changed}\nCommit them there"
    head, known = repository.resolve("HEAD"), applied.commit
    log, published = ("log", "--format=    %h %s"), f"--glob={kept_commits.PUBLISHED}/*"  # made of patches
    if ahead := repository.run(*log, head, f"^{known}", "--not", published, writes=False) or repository.run(
        *log, "--branches", f"^{known}", "--not", published, f"--glob={kept_commits.REPLACED}", writes=False
    ):  # a branch may stand on what the tree was before: that is kept
        return f"{root} has commits that are in no patch:\n{ahead}"
    linked = "\n".join(f"    linked work tree {p.name}" for p in (root / ".git/worktrees").glob("*"))
    if kept := f"{repository.run('stash', 'list', writes=False)}{linked}":
        return f"{root} has stashes or linked work trees:\n{kept}"
    if head == known:
        return None
    count = len(repository.commits(head, known))
    return (
        kept_commits.checked_out(repository, known)
        or unfinished.off_branch(repository)
        or f"{root} lacks the last {count} of the commits that nox -s apply made (git reset?)"
    )


def _keep_or_drop(root: Path) -> str:
    return (
        f"{command('export', root)} writes commits to patches/, and what changed in the fork's own files to "
        f"fork/; {command('apply', root, '--reset')} replaces "
        "the tree, keeping its commits and stashes under refs/replaced"
    )


def _moment(root: Path) -> int:
    """Now, by the clock of the file system that a tree lies on, in nanoseconds."""
    stamp = root / ".git/seen"
    stamp.touch()
    return stamp.stat().st_mtime_ns


def unsaved(root: Path) -> str | None:
    """What is in a finished tree and in no patch, in words; None when there is nothing, or no tree."""
    applied = read_marker(root)
    return _work_at_stake(Repository(root, SeriesError), applied) if applied else None


def _reuse(series: Series, pin: Upstream, root: Path, *, reset: bool) -> Tree | None:
    """The finished tree when it is of these bytes; None when it may be replaced."""
    if not root.exists():
        return None
    if reset and (root / ".git").is_dir():
        return None
    finished = Repository(root, SeriesError)
    applied = read_marker(root)
    if applied is None or not finished.is_top_level():
        raise SeriesError(f"{root} is nothing that nox -s apply made; move it away, or delete it.")
    seen = _moment(root)
    if stake := _work_at_stake(finished, applied):
        raise SeriesError(f"{stake}." if unfinished.in_words(root) else f"{stake}. {_keep_or_drop(root)}.")
    digest = series.digest(applied.base)  # of a base with the own files that the tree was made of
    if (applied.pin, applied.own, applied.digest) != (pin_key(pin), series.own.digests, digest):
        return None
    return Tree(root, applied.base, applied.commit, digest, *sources(finished), seen=seen)


def sources(repository: Repository) -> tuple[str, str]:
    """Ids of what the binding and the kernels are compiled from; both in cutlass where a tree has it.

    Empty of a tree without csrc, a python upstream's: nothing is compiled of it.
    """
    status, csrc, _ = repository.attempt("rev-parse", "--verify", "--quiet", "HEAD:csrc")
    if status != 0:
        return "", ""
    csrc = csrc.strip()
    _, listed, _ = repository.attempt("ls-tree", "HEAD", "csrc/flash_attn/", "csrc/cutlass/")
    others = ("/flash_api.cpp", "/core", "/api")  # of the bindings; no kernel file includes them
    kernels = [line for line in listed.splitlines() if not line.endswith(others)]
    return csrc, hashlib.sha256("\n".join(kernels).encode()).hexdigest()


def reusable(series: Series, pin: Upstream, root: Path) -> Tree | None:
    """The finished tree where it is exactly this series and nothing else is in it."""
    try:
        return _reuse(series, pin, root, reset=False)
    except SeriesError:
        return None


def sweep(root: Path) -> None:
    """Remove what killed runs left beside a folder."""
    for left in root.parent.glob(f"{temporary_prefix(root)}*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


def temporary_prefix(root: Path) -> str:
    """How the folders begin in which another is made aside; no name that a person would give."""
    return f".{root.name}.fa2-aside-"


def _folder_beside(root: Path) -> Path:
    """An empty folder on the file system of ``root``; those of killed runs go."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        sweep(root)
        return Path(tempfile.mkdtemp(dir=root.parent, prefix=temporary_prefix(root)))
    except OSError as e:
        raise SeriesError(f"{root.parent}: cannot make a folder there: {e.strerror}.") from e


def finished(root: Path, base: str, commit: str, digest: str) -> Tree:
    """A work tree in which these commits are checked out, as it is now."""
    return Tree(root, base, commit, digest, *sources(Repository(root, SeriesError)), seen=_moment(root))


def apply(
    series: Series,
    pin: Upstream,
    checkout: upstream.Checkout,
    root: Path,
    *,
    of: int | None = None,
    reset: bool = False,
) -> Tree:
    """Make ``root`` a repository: a commit of upstream's files, one of our own, and one of each patch.

    A tree that was applied from the same bytes is taken as it is. Otherwise it is made aside and renamed,
    so that an interrupted run leaves the old one or none.

    Args:
        series: the patches to apply.
        pin: the release they are for.
        checkout: its files.
        root: the work tree.
        of: how many patches the whole series has, where ``series`` is a part; such a tree is not exported.
        reset: replace a finished tree whatever is in it.

    Raises:
        SeriesError: a patch does not apply exactly, or the finished tree holds work that is in no patch.
    """
    if (reused := _reuse(series, pin, root, reset=reset)) is not None:
        return reused
    carried = None if reset else carry.what(series, pin, root, of or len(series.patches))
    temporary = _folder_beside(root)
    try:
        work = temporary / "tree"
        if carried is not None and (made := carry.into(work, carried, series, pin)) is not None:
            carry.swap(work, carried)
            console.note(f"carried into {root}: {carried.in_words(series)}")
        else:
            made = _anew(work, series, pin, checkout, of or len(series.patches))
            kept_commits.put_in_place(work, root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    # Only now: files that the old tree shares with the new one change when it goes.
    made_of = finished(root, *made)
    if changed := uncommitted.changes(Repository(root, SeriesError)):
        raise SeriesError(f"{root} changed while it was made:\n{changed}\n{_keep_or_drop(root)}.")
    return made_of


def _anew(
    work: Path, series: Series, pin: Upstream, checkout: upstream.Checkout, of: int
) -> tuple[str, str, str]:
    """Make ``work`` the tree of a series: base, last commit and digest."""
    base = ground.make_base(work, pin, checkout, series.own)
    repository = Repository(work, SeriesError)
    for patch in series.patches:
        path = (series.folder / patch.name).resolve()
        _prove_exact(repository, path)
        repository.run(*AM, str(path))
    commit = repository.resolve("HEAD")
    digest = write_marker(work, pin_key(pin), series, base, commit, of)
    repository.run("tag", "base", base)
    repository.run("tag", "upstream", ground.upstream_of(repository, base))
    return base, commit, digest

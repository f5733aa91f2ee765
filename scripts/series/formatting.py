"""Commits of a tree as patches, and apart from them our own files."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base.errors import SeriesError
from scripts.series import ground, mail, model, restack
from scripts.series.places import command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scripts.base.git import Repository
    from scripts.series.marker import Applied


@dataclass(frozen=True)
class Split:
    """A tree's commits, told apart: our own files, and patches of upstream's."""

    base: str  # the commit of our own files, on upstream's
    tip: str
    own: Mapping[str, bytes]
    patches: dict[str, bytes]


def format_patches(repository: Repository, base: str, target: Path, tip: str = "HEAD") -> list[str]:
    """Write the commits after ``base`` as canonical patches into ``target``; return their names in order.

    A name is the subject's, without a number: the order is in ``series`` alone, so that a patch which comes,
    goes or moves renames no other.

    Raises:
        SeriesError: two would have one name.
    """
    options = [
        "--zero-commit",
        "--no-signature",
        "--no-numbered",
        "--no-renames",
        "--diff-algorithm=histogram",
        "--stat=72",
    ]
    options += [
        "--no-attach",
        "--no-thread",
        "--no-add-header",
        "--no-encode-email-headers",
        "--no-full-index",
        "--abbrev=12",
    ]
    options += ["--filename-max-length=100", f"--output-directory={target.resolve()}"]
    out = repository.run("format-patch", *options, f"{base}..{tip}", writes=False)
    return _without_numbers(repository, [Path(line) for line in out.splitlines()])


def _require_patches(repository: Repository, base: str, tip: str) -> None:
    """Refuse a merge, an empty commit, and one that waits to be folded: no patch can hold them."""
    for commit in repository.commits(base, tip):
        about = repository.run("log", "-1", "--format=%h %s", commit, writes=False)
        if re.match(r"\w+ (fixup|squash|amend)! ", about):
            raise SeriesError(
                f"{repository.root}: commit {about} is not folded into its patch yet: "
                "git rebase -i --autosquash base"
            )
        if " " in repository.run("log", "-1", "--format=%P", commit, writes=False):
            raise SeriesError(
                f"{repository.root}: commit {about} is a merge; a series is a line (git rebase makes one)."
            )
        if not repository.run("diff-tree", "--no-commit-id", "--name-only", commit, writes=False):
            raise SeriesError(f"{repository.root}: commit {about} changes no file; drop it (git rebase -i).")


def refuse_own_commits(repository: Repository, applied: Applied) -> None:
    """Refuse commits of our own files alone: an export makes them part of what the patches stand on.

    Raises:
        SeriesError: there is one, where our own files are no patches'.
    """
    theirs = frozenset(repository.files(ground.upstream_of(repository, applied.base)))
    for commit in repository.commits(applied.base) if applied.own else ():
        names = repository.run("diff-tree", "--no-commit-id", "-r", "-z", "--name-only", commit, writes=False)
        if not theirs.intersection(names.split("\0")):
            about = repository.run("log", "-1", "--format=%h %s", commit, writes=False)
            raise SeriesError(
                f"{repository.root}: commit {about} changes our own files alone, and is no patch. "
                f"{command('export', repository.root)} takes it into fork/; then edit."
            )


def split(repository: Repository, base: str, own: Mapping[str, bytes] | None) -> Split:
    """Tell commits apart: patches of upstream's files, on a commit of our own files.

    A commit of our own files alone is no patch.

    Args:
        repository: a tree.
        base: what the commits stand on.
        own: our own files as they are at the end; None: they are not told apart, and patches add them.

    Raises:
        SeriesError: a commit can be no patch, or its message lacks what one needs; it names the commit.
    """
    if own is None:
        return Split(base, repository.resolve("HEAD"), {}, exported_patches(repository, base))
    _require_patches(repository, base, "HEAD")
    upstream = ground.upstream_of(repository, base)
    theirs = frozenset(repository.files(upstream))
    stack = restack.only(restack.layers(repository, base), theirs.__contains__)
    made, last = restack.write(repository, upstream, own, stack)
    return Split(made, last, own, _patches_of(repository, made, last))


def _without_numbers(repository: Repository, numbered: list[Path]) -> list[str]:
    """Rename what git numbered; the names in order."""
    names: list[str] = []
    for path in numbered:
        name = re.sub(r"^\d+-", "", path.name)
        if name.startswith("."):
            raise SeriesError(
                f"{repository.root}: the subject of patch {len(names) + 1} gives no name for a file "
                f"({name}); begin it with a letter (git rebase -i, and reword)."
            )
        if name in names:
            raise SeriesError(
                f"{repository.root}: two commits would be {name}; give one of them another subject (git "
                "rebase -i, and reword)."
            )
        path.replace(path.with_name(name))
        names.append(name)
    return names


def exported_patches(repository: Repository, base: str, tip: str = "HEAD") -> dict[str, bytes]:
    """The commits after ``base`` as patches, each of them well-formed.

    Raises:
        SeriesError: a commit can be no patch, or its message lacks what one needs; it names the commit.
    """
    _require_patches(repository, base, tip)
    return _patches_of(repository, base, tip)


def _patches_of(repository: Repository, base: str, tip: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="fa2-export-") as folder:
        paths = [Path(folder) / name for name in format_patches(repository, base, Path(folder), tip)]
        try:
            mail.require_same(repository, base, tip, paths)
            for path in paths:
                model.parse_patch(path)
        except SeriesError as e:
            name, fault = re.sub(r"^.*/([^/]*\.patch):\d+: ", r"\1\n", str(e)).split("\n", 1)
            raise SeriesError(
                f"{repository.root}: the commit of {name}: {fault} (git commit --amend, or git rebase -i "
                "and reword.)"
            ) from e
        return {path.name: path.read_bytes() for path in paths}

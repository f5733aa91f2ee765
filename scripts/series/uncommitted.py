"""A work tree's files against a commit, byte by byte.

``git status`` believes the index: flags (assume-unchanged, skip-worktree), excludes, and the settings of the
tree's own repository hide changes from it.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from scripts.base.git import Repository

HOW_TO_SHOW = (
    "git status does not show them. To make it show one: git update-index --no-assume-unchanged FILE, "
    "git update-index --no-skip-worktree FILE, or for an ignored one git add --force FILE"
)


def changes(repository: Repository) -> str:
    """What is in a work tree and not in its HEAD, as ``git status`` tells it; empty when nothing is."""
    if told := str(repository.run("status", "--porcelain")).strip("\n"):
        return told
    hidden = differences(repository)
    shown = (line.encode("utf-8", "backslashreplace").decode() for line in hidden)
    return "\n".join((*shown, HOW_TO_SHOW)) if hidden else ""


def differences(repository: Repository, tree: str = "HEAD") -> list[str]:
    """The files that are others than a commit's or a tree's, as ``git status --porcelain`` writes them."""
    wanted = {}
    for entry in repository.raw("ls-tree", "-r", "-z", "--full-tree", tree).split(b"\0")[:-1]:
        about, _, path = entry.partition(b"\t")
        mode, _, name = about.decode().split(" ")
        wanted[os.fsdecode(path)] = (mode, name)
    there = dict(_held(repository.root))
    told = {path: "M" for path in wanted.keys() & there.keys() if wanted[path] != there[path]}
    told |= dict.fromkeys(wanted.keys() - there.keys(), "D")
    lines = [f" {how} {path}" for path, how in sorted(told.items())]
    return lines + [f"?? {path}" for path in sorted(there.keys() - wanted.keys())]


def _held(folder: Path, below: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Every file below a folder but its repository, with the mode and the id that git would give it."""
    with os.scandir(folder / below) as entries:
        for entry in entries:
            name, mode = f"{below}{entry.name}", entry.stat(follow_symlinks=False).st_mode
            if name == ".git":
                continue
            if stat.S_ISDIR(mode):
                yield from _held(folder, f"{name}/")
            elif stat.S_ISLNK(mode):
                yield name, ("120000", _id(os.fsencode((folder / name).readlink())))
            elif stat.S_ISREG(mode):
                content = (folder / name).read_bytes()
                yield name, ("100755" if mode & stat.S_IXUSR else "100644", _id(content))


def _id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

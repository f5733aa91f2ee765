"""Commits on another ground: the same changes and messages, on a tree whose own files are others.

A patch and our own files never touch the same file, so nothing is merged. One process of git writes all.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.series import own as own_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from scripts.base.git import Repository

_FILE = "100644"
_SCRATCH = "refs/series/restacked"


@dataclass(frozen=True)
class Change:
    """What a commit does to one file."""

    path: bytes
    mode: str  # of the file after it; "000000" where it is gone
    blob: str


@dataclass(frozen=True)
class Layer:
    """A commit without its parent."""

    author: bytes  # name, address and time, as the commit has them
    committer: bytes
    encoding: bytes  # of the message; empty: UTF-8
    message: bytes
    changes: tuple[Change, ...]


def layers(repository: Repository, base: str, tip: str = "HEAD") -> list[Layer]:
    """The commits after ``base``, oldest first."""
    commits = repository.commits(base, tip)
    changes = _changes(repository, commits)
    return [
        Layer(
            about[b"author"],
            about[b"committer"],
            about.get(b"encoding", b""),
            message,
            tuple(changes[commit]),
        )
        for commit in commits
        for about, message in (_commit_object(repository, commit),)
    ]


def _changes(repository: Repository, commits: Sequence[str]) -> dict[str, list[Change]]:
    """What each commit does to files, by one process."""
    changes: dict[str, list[Change]] = {commit: [] for commit in commits}
    if not commits:
        return changes
    with tempfile.TemporaryDirectory(prefix="fa2-restack-") as folder:
        asked = Path(folder) / "commits"
        asked.write_text("".join(f"{commit}\n" for commit in commits), encoding="utf-8")
        options = ("--stdin", "--root", "-r", "-z", "--raw", "--no-renames", "--no-abbrev")
        words = iter(repository.raw("diff-tree", *options, stdin=asked).split(b"\0")[:-1])
    commit = ""
    for word in words:
        if word.startswith(b":"):
            _, mode, _, blob, _ = word.decode().lstrip(":").split(" ")
            changes[commit].append(Change(next(words), mode, blob))
        else:
            commit = word.decode()
    return changes


def only(stack: Sequence[Layer], keep: Callable[[str], bool]) -> list[Layer]:
    """The same of some files alone; a commit that changes none of them goes."""
    kept = [replace(one, changes=tuple(c for c in one.changes if keep(os.fsdecode(c.path)))) for one in stack]
    return [one for one in kept if one.changes]


def write(
    repository: Repository,
    upstream: str,
    contents: Mapping[str, bytes],
    stack: Sequence[Layer],
    like: str | None = None,
) -> tuple[str, str]:
    """Make a commit of our own files on upstream's, and these on it.

    Args:
        repository: in which they are made; no branch and no file of its work tree changes.
        upstream: the commit of upstream's files alone.
        contents: our own files.
        stack: what comes on them.
        like: the commit whose author and date that of our own files has (default: upstream's).

    Returns:
        The ids of the ground, which is upstream's commit where we have no file, and of the last commit.
    """
    parent = upstream
    told: list[bytes] = []
    if contents:
        about, _ = _commit_object(repository, like or upstream)
        message = own_files.COMMIT.encode() + b"\n"
        told += _commit(1, parent, Layer(about[b"author"], about[b"committer"], b"", message, ()))
        for name, content in contents.items():
            told += [b"M %s inline %s\n" % (_FILE.encode(), _quoted(name.encode())), *_data(content)]
        parent = ":1"
    for mark, one in enumerate(stack, 2):
        told += _commit(mark, parent, one)
        told += [
            b"D %s\n" % _quoted(c.path)
            if c.mode == "000000"
            else b"M %s %s %s\n" % (c.mode.encode(), c.blob.encode(), _quoted(c.path))
            for c in one.changes
        ]
        parent = f":{mark}"
    if not told:
        return upstream, upstream
    with tempfile.TemporaryDirectory(prefix="fa2-restack-") as folder:
        stream, marks = Path(folder) / "stream", Path(folder) / "marks"
        stream.write_bytes(b"".join(told) + b"done\n")
        repository.run("fast-import", "--quiet", "--force", "--done", f"--export-marks={marks}", stdin=stream)
        made = dict(line.split() for line in marks.read_text(encoding="utf-8").splitlines())
    repository.run("update-ref", "-d", _SCRATCH)
    return made.get(":1", upstream), made.get(parent, upstream)


def _commit_object(repository: Repository, commit: str) -> tuple[dict[bytes, bytes], bytes]:
    """A commit's fields, of those that stand more than once the last, and its message."""
    head, _, message = (repository.find(commit) or b"").partition(b"\n\n")
    return dict(line.split(b" ", 1) for line in head.split(b"\n") if b" " in line), message


def _commit(mark: int, parent: str, one: Layer) -> list[bytes]:
    head = b"commit %s\nmark :%d\nauthor %s\ncommitter %s\n" % (
        _SCRATCH.encode(),
        mark,
        one.author,
        one.committer,
    )
    encoding = b"encoding %s\n" % one.encoding if one.encoding else b""
    return [head, encoding, *_data(one.message), b"from %s\n" % parent.encode()]


def _data(content: bytes) -> list[bytes]:
    return [b"data %d\n" % len(content), content, b"\n"]


def _quoted(path: bytes) -> bytes:
    r"""A path as fast-import reads it.

    >>> _quoted(b'a b"c')
    b'"a b\\"c"'
    >>> _quoted(b"a\nb\\c")
    b'"a\\nb\\\\c"'
    """
    return b'"%s"' % path.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")

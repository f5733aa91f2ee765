"""Our own files in commits and in a work tree, and what there is none that ``fork/`` can hold."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from scripts.base.errors import SeriesError
from scripts.series import ground, own, uncommitted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from scripts.base.git import Repository
    from scripts.series.marker import Applied

_ORDINARY = b"100644"  # the mode of every one


def in_commit(
    repository: Repository, upstream: Iterable[str], commit: str, package: str | None = None
) -> dict[str, bytes]:
    """The files of a commit that are not upstream's.

    Raises:
        SeriesError: one is none that ``fork/`` can hold; it names it.
    """
    theirs, contents = frozenset(upstream), {}
    for name, mode, blob in _entries(repository, commit):
        if name in theirs:
            continue
        if not own.is_ours_to_touch(name, package):
            raise SeriesError(
                f"{repository.root}: {own.shown(name)} is no file that a build reads "
                f"({own.where_ours(package)}); take it out of the commits."
            )
        if mode != _ORDINARY:
            raise SeriesError(_not_ordinary(repository.root / name))
        contents[name] = repository.read(blob)
    return contents


def committed(repository: Repository, commit: str, folder: str) -> own.OwnFiles:
    """What :func:`own.read` reads of a folder of this repository, as a commit has it."""
    entries = _entries(repository, commit, "--", f"{folder}/")
    named = ((name.removeprefix(f"{folder}/"), blob) for name, _, blob in entries)
    return own.OwnFiles(
        None, {name: repository.read(blob) for name, blob in named if not own.is_left_by_programs(name)}
    )


def _entries(repository: Repository, commit: str, *paths: str) -> Iterator[tuple[str, bytes, str]]:
    """Name, mode and blob of a commit's files, by name."""
    listed = repository.raw("ls-tree", "-r", "-z", "--full-tree", commit, *paths)
    for entry in sorted(listed.split(b"\0")[:-1], key=lambda entry: entry.partition(b"\t")[2]):
        about, _, name = entry.partition(b"\t")
        mode, _, blob = about.split(b" ")
        yield os.fsdecode(name), mode, blob.decode()


def _in_work_tree(root: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Files of a work tree.

    Raises:
        SeriesError: one is a link, or may be executed: ``fork/`` cannot hold that.
    """
    contents = {}
    for name in sorted(names):
        path = root / name
        if path.is_symlink() or not path.is_file() or path.stat().st_mode & 0o100:
            raise SeriesError(_not_ordinary(path))
        contents[name] = path.read_bytes()
    return contents


def _not_ordinary(path: Path) -> str:
    """That a file is none that ``fork/`` can hold, in words."""
    return (
        f"{path} is a link or may be executed; a file of ours is an ordinary one. Put the file itself there, "
        "or chmod 644 it (and amend the commit that made it so)."
    )


def not_committed(root: Path, changed: str) -> str:
    """That changes are not committed, in words."""
    return f"{root} has uncommitted changes:\n{changed}\nCommit them, or drop them."


def exportable(repository: Repository, applied: Applied, package: str | None) -> dict[str, bytes]:
    """Our own files as they lie in a work tree.

    Raises:
        SeriesError: files of upstream's are changed and not committed, something is changed in the index
            alone, or a file is none that ``fork/`` can hold.
    """
    root = repository.root
    theirs = frozenset(repository.files(ground.upstream_of(repository, applied.base)))
    listed = uncommitted.differences(repository)
    if changed := [line for line in listed if line[3:] in theirs]:
        raise SeriesError(not_committed(root, "\n".join(changed)))
    there = {line[3:] for line in listed}
    staged = repository.run("diff", "--cached", "--name-only", "--no-renames", "-z", "HEAD", writes=False)
    if alone := sorted({name for name in staged.split("\0") if name} - there):
        told = "\n".join(f"M  {own.shown(name)} (in the index alone)" for name in alone)
        raise SeriesError(not_committed(root, told))
    names = {*repository.files("HEAD"), *there} - theirs
    names -= {line[3:] for line in listed if line.startswith(" D")}
    if strange := sorted(name for name in names if not own.is_ours_to_touch(name, package)):
        raise SeriesError(
            f"{root} has files that no build reads ({own.where_ours(package)}): "
            f"{', '.join(map(own.shown, strange))}. Delete them, or move them out of the tree."
        )
    return _in_work_tree(root, names)

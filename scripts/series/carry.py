"""Our own files into a finished tree that has nothing else to change: a second's work."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import ground, kept_commits, restack, uncommitted
from scripts.series import own as own_files
from scripts.series.marker import pin_key, read_marker, write_marker

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.series.marker import Applied
    from scripts.series.model import Series
    from scripts.source.matrix_tables import Upstream


@dataclass(frozen=True)
class Carried:
    """A tree into which our own files can be taken."""

    root: Path
    applied: Applied

    def in_words(self, series: Series) -> str:
        """Which of them are others than the tree's."""
        known = self.applied.own
        names = own_files.merge(known, series.own.digests, known).behind
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def what(series: Series, pin: Upstream, root: Path, of: int) -> Carried | None:
    """A finished tree of this release and these patches; None where it is of others.

    ``of``: how many patches the whole series has.
    """
    applied = read_marker(root) if root.exists() else None
    wanted = (pin_key(pin), of, [(p.name, p.sha256) for p in series.patches])
    if applied is None or (applied.pin, applied.of, [*applied.patches.items()]) != wanted:
        return None
    return Carried(root, applied)


def into(work: Path, carried: Carried, series: Series, pin: Upstream) -> tuple[str, str, str] | None:
    """Make ``work`` that tree with our own files as they are now: base, last commit and digest.

    The last commit that it had is kept under refs/replaced: it may hold what was exported and taken back.

    None: what the tree's own repository is set to (attributes, a sparse checkout, flags of its index) gives
    other files than the commit has; ``work`` is gone, and the tree is to be made anew.

    Raises:
        SeriesError: upstream has a file of ours, or no build reads one.
    """
    shutil.copytree(carried.root, work, symlinks=True, copy_function=_link_or_copy)
    repository, applied = Repository(work, SeriesError), carried.applied
    upstream = ground.upstream_of(repository, applied.base)
    own_files.require_no_others(series.own, repository.files(upstream), pin.package)
    stack = restack.layers(repository, applied.base, applied.commit)
    base, commit = restack.write(repository, upstream, series.own.contents, stack)
    kept_commits.keep_tips(repository, applied.commit)
    repository.attempt("update-index", "-q", "--refresh")  # else git takes every link for a changed file
    status, _, _ = repository.attempt("reset", "--quiet", "--hard", commit)
    if status != 0 or uncommitted.differences(repository):
        shutil.rmtree(work)
        return None
    repository.run("tag", "--force", "base", base)
    return base, commit, write_marker(work, pin_key(pin), series, base, commit, applied.of)


def swap(work: Path, carried: Carried) -> None:
    """Put a tree that :func:`into` made in its place; what was done there meanwhile is kept as commits."""
    root = carried.root
    files.exchange(work, root)
    try:
        former = Repository(work, SeriesError)
        if uncommitted.differences(former) or former.resolve("HEAD") != carried.applied.commit:
            kept_commits.keep_commits(Repository(root, SeriesError), work, root)
    except BaseException:  # an interrupt too: what is aside is deleted then
        files.exchange(work, root)
        raise


def _link_or_copy(source: str, target: str) -> str:
    """As a link, which takes no time: git replaces files and does not write into them, but for its logs."""
    if "/.git/" not in source or "/.git/objects/" in source:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:  # of a file system without links
            pass
        else:
            return target
    return str(shutil.copy2(source, target, follow_symlinks=False))

"""Resolutions of conflicts, remembered with git's rerere in a cache of our own; none is taken silently.

The cache is a folder that no rebase replaces. Conflicts are made again in a clone that goes afterwards, so
that nothing is written where a person works, and the cache is swapped whole.
"""

from __future__ import annotations

import difflib
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console, files
from scripts.base.errors import ActionNeeded, SeriesError
from scripts.series import tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.base.git import Repository
    from scripts.series.rebase.resolution import Stop

_RERERE = ("-c", "rerere.enabled=true", "-c", "rerere.autoupdate=false", "rerere")
_POSTIMAGE = "postimage"  # in the folder of a conflict, once it is resolved


@dataclass(frozen=True)
class Offer:
    """A file with a conflict, and how it was resolved before."""

    name: str
    conflict: bytes
    resolved: bytes

    @property
    def diff(self) -> list[str]:
        """From the conflict to the resolution."""
        before, after = (
            content.decode("utf-8", errors="replace").splitlines()
            for content in (self.conflict, self.resolved)
        )
        return list(difflib.unified_diff(before, after, self.name, f"{self.name} as remembered", lineterm=""))


@contextmanager
def _conflict(stop: Stop, cache: Path) -> Iterator[tuple[Repository, list[str]]]:
    """A clone in which the patch has the conflict that stopped it, and the files with it.

    Its rerere knows what ``cache`` holds.
    """
    with tempfile.TemporaryDirectory(prefix="fa2-resolved-") as folder:
        clone = stop.repository.shared_copy(Path(folder) / "source")
        clone.run("checkout", "--quiet", "--detach", stop.before)
        clone.attempt("cherry-pick", stop.commit)
        listed = clone.run("diff", "--name-only", "--diff-filter=U", "-z", writes=False).split("\0")
        known = clone.root / ".git/rr-cache"
        if cache.is_dir():
            shutil.copytree(cache, known)
        known.mkdir(exist_ok=True)
        yield clone, [name for name in listed if name and (clone.root / name).is_file()]


def offers(cache: Path, stop: Stop) -> tuple[Offer, ...]:
    """The files of a conflict that were resolved before."""
    if not cache.is_dir():
        return ()
    with _conflict(stop, cache) as (clone, names):
        conflicts = {name: (clone.root / name).read_bytes() for name in names}
        clone.run(*_RERERE)
        after = {name: (clone.root / name).read_bytes() for name in names}
    return tuple(
        Offer(name, conflicts[name], after[name]) for name in names if after[name] != conflicts[name]
    )


def take(cache: Path, stop: Stop) -> list[str]:
    """Write remembered resolutions into the work tree; the files that still have a conflict.

    Raises:
        ActionNeeded: none is remembered, or a file is not the conflict any more.
    """
    found = offers(cache, stop)
    if not found:
        raise ActionNeeded(f"no resolution of {stop.name} is remembered. Edit the files, then {stop.go_on}.")
    root = stop.repository.root
    for offer in found:
        path = root / offer.name
        if not path.is_file() or path.read_bytes() not in (offer.conflict, offer.resolved):
            raise ActionNeeded(
                f"{path} was edited since the conflict, and would be overwritten. Finish it and then "
                f"{stop.go_on}; or git -C {root} checkout --merge -- {offer.name} makes the conflict again, "
                "in other words."
            )
    for offer in found:
        with files.writing(root / offer.name):
            (root / offer.name).write_bytes(offer.resolved)
    return [name for name in stop.open_files if name not in {offer.name for offer in found}]


def remember(cache: Path, stop: Stop, resolved: str) -> None:
    """Remember how a commit resolves what stopped the patch. A failure is told, and stops nobody."""
    try:
        _remember(cache, stop, resolved)
    except (SeriesError, OSError) as e:
        console.warn(f"the resolution of {stop.name} is not remembered: {e}")


def _remember(cache: Path, stop: Stop, resolved: str) -> None:
    # An empty cache: what was remembered of the same conflict is replaced, not added to.
    with _conflict(stop, cache / "none") as (clone, names):
        clone.run(*_RERERE)
        held = set(clone.files(resolved))
        for name in set(names) & held:
            (clone.root / name).write_bytes(clone.read(f"{resolved}:{name}"))
        clone.run(*_RERERE)
        made = [p.parent for p in (clone.root / ".git/rr-cache").glob(f"*/{_POSTIMAGE}*")]
        if made:
            _add(cache, made)


def _add(cache: Path, made: list[Path]) -> None:
    """Put folders of resolved conflicts into the cache, which is swapped whole."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    tree.sweep(cache)
    with tempfile.TemporaryDirectory(dir=cache.parent, prefix=tree.temporary_prefix(cache)) as temporary:
        copy = Path(temporary) / cache.name
        if cache.is_dir():
            shutil.copytree(cache, copy)
        for folder in made:
            shutil.rmtree(copy / folder.name, ignore_errors=True)
            shutil.copytree(folder, copy / folder.name)
        if cache.is_dir():
            files.exchange(copy, cache)
        else:
            copy.replace(cache)

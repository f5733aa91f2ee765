"""What was applied to a work tree, noted in its repository."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from scripts.base import documents, files
from scripts.base.documents import Document, OpenDocument
from scripts.base.errors import SeriesError
from scripts.series.places import command

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.series.model import Series
    from scripts.source.matrix_tables import Upstream

_NAME = "series.json"  # in the repository's .git


class Applied(Document):
    """What a work tree is made of."""

    format: Literal[3] = 3
    pin: str  # of the release (:func:`pin_key`); empty where an older program made the tree
    digest: str  # of the series
    base: str
    commit: str
    of: int  # how many patches the whole series has
    patches: dict[str, str]  # name to sha256
    own: dict[str, str]  # the same of our own files, by their paths in the tree


class _Older(OpenDocument):
    format: Literal[1, 2]
    commit: str


def pin_key(pin: Upstream) -> str:
    """What a base is made of."""
    return f"{pin.distribution} {pin.version} {pin.commit} {pin.cutlass} {pin.sdist_sha256}"


def read_marker(root: Path) -> Applied | None:
    """What was applied to a tree; None for a tree that is not ours.

    Of an older format the commit alone counts.

    Raises:
        SeriesError: the note is damaged.
    """
    path = root / ".git" / _NAME
    if not path.is_file():
        return None
    try:
        older = _Older.model_validate_json(path.read_bytes())
    except ValidationError:
        anew = command("apply", root, "--reset")
        remedy = f"{anew} makes the tree anew, and keeps its commits under refs/replaced"
        return documents.read(Applied, path, error=SeriesError, remedy=remedy)
    return Applied(pin="", digest="", base="", commit=older.commit, of=0, patches={}, own={})


def write_marker(root: Path, pin: str, series: Series, base: str, commit: str, of: int) -> str:
    """Note what a tree is made of; the series' digest."""
    digest, patches = series.digest(base), {p.name: p.sha256 for p in series.patches}
    applied = Applied(
        pin=pin,
        digest=digest,
        base=base,
        commit=commit,
        of=of,
        patches=patches,
        own=series.own.digests,
    )
    files.write(root / ".git" / _NAME, applied.model_dump_json() + "\n")
    return digest

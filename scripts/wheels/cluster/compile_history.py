"""What kernel files were seen to take on this user's workers: seconds and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from scripts.base import documents, files, layout
from scripts.base.documents import Document
from scripts.base.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from scripts.wheels.compiling.kernels import Unit


class Taken(Document):
    """What one file took, the last time that it was compiled and not answered by a cache."""

    seconds: float  # of CPU
    memory: float  # bytes; the most that it was ever seen to take


class Seen(Document):
    """The file: what was taken, by :func:`name_of`."""

    format: Literal[1]
    files: dict[str, Taken] = Field(default_factory=dict)


def _path() -> Path:
    return layout.cache("seen.json")


def name_of(unit: Unit, cuda: str, architectures: Sequence[str]) -> str:
    """What a file is known by; its sources may change, what it takes changes little with them."""
    return f"{unit.target.stem} cuda {cuda} sm {','.join(architectures)}"


def read() -> Seen:
    """What was seen.

    Raises:
        CompileError: the file is damaged.
    """
    path = _path()
    if not path.exists():
        return Seen(format=1)
    return documents.read(Seen, path, error=CompileError, remedy="delete it; it is made anew")


def note(name: str, taken: Taken) -> None:
    """Keep what a file took."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.in_turn(path.with_suffix(".lock"), "notes what files take"):
        before = read()
        known = before.files.get(name)
        most = max(taken.memory, known.memory) if known else taken.memory
        now = before.model_copy(
            update={"files": {**before.files, name: taken.model_copy(update={"memory": most})}}
        )
        files.write(path, now.model_dump_json(indent=1))


def expected(unit: Unit, taken: Taken | None) -> Unit:
    """A unit with what its file was seen to take, in the place of the guess."""
    return replace(unit, seconds=taken.seconds, memory=taken.memory) if taken else unit

"""What an index tells of a folder's wheels: each with what lies beside it, and whether it is yanked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scripts.base import console
from scripts.base.errors import UsageError, WheelError
from scripts.wheels.index import reading, wheel_variants, yanked_list

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.wheels.index.indexed_wheel import IndexedWheel
    from scripts.wheels.index.reading import Beside
    from scripts.wheels.index.wheel_variants import Variant


@dataclass(frozen=True)
class Entry:
    """One wheel of the index."""

    wheel: IndexedWheel
    beside: Beside
    yanked: str | None = None  # the reason
    variant: Variant | None = None

    @property
    def file(self) -> str:
        """Its file name."""
        return self.wheel.path.name


def read(folder: Path, yanked: Path | None) -> tuple[Entry, ...]:
    """Every wheel of a folder, by distribution, newest version first.

    Raises:
        UsageError: there is none.
        WheelError: one is damaged, of another project, or disagrees with its name; or a proof was changed, or
            is of another wheel.
        VerifyError: a proof is damaged.
    """
    paths = sorted(folder.glob("*.whl"))
    if not paths:
        raise UsageError(
            f"{folder} has no wheels; build one (nox -s build), or name a folder (--wheels FOLDER)."
        )
    listed = yanked_list.read(yanked)
    wheels = [reading.read(path) for path in paths]
    entries = [Entry(w, reading.beside(w), listed.reason(w.path.name)) for w in wheels]
    for name in sorted(listed.wheels.keys() - {path.name for path in paths}):
        console.warn(f"{yanked}: {name} is not in {folder}")
    _refuse_orphans(folder, entries)
    entries.sort(key=lambda e: (e.wheel.version, e.file), reverse=True)
    return tuple(sorted(entries, key=lambda e: e.wheel.name))


def _refuse_orphans(folder: Path, entries: list[Entry]) -> None:
    """A proof whose wheel is gone would get lost without a word."""
    known = {path for entry in entries for path in entry.beside.files}
    if orphans := [path.name for path in sorted(folder.glob("*.proof.json")) if path not in known]:
        raise WheelError(
            f"{folder / orphans[0]}: its wheel is not there. Put the wheel back, or take the proof out."
        )


def with_variants(entries: tuple[Entry, ...], folder: Path) -> tuple[Entry, ...]:
    """The same with a copy of each wheel, labelled for the GPUs that it serves, in a folder."""
    return tuple(replace(entry, variant=wheel_variants.pack(entry.wheel, folder)) for entry in entries)


def by_distribution(entries: tuple[Entry, ...]) -> dict[str, tuple[Entry, ...]]:
    """The entries of each distribution."""
    names = dict.fromkeys(entry.wheel.name for entry in entries)
    return {name: tuple(entry for entry in entries if entry.wheel.name == name) for name in names}

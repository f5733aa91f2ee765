"""Where a rebase stands, as ``state.json`` keeps it, and what a finished one reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
STATE = "state.json"  # in the folder of a rebase


def under_way(folder: Path) -> bool:
    """Whether a folder holds a rebase that has not ended."""
    return (folder / STATE).exists()


@dataclass(frozen=True)
class Done:
    """A patch that was dealt with."""

    patch: str
    outcome: str
    commit: str  # on the new base; of the old series for one that was skipped
    reason: str = ""  # why it was skipped
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """Where a rebase stands."""

    old_pin: dict[str, Any]
    new_pin: dict[str, Any]
    old_base: str
    new_base: str
    tip: str
    patches: dict[str, str]  # name to sha256, as patches/ had them at the start
    landed: dict[str, tuple[str, str]]
    done: tuple[Done, ...] = ()
    stopped: bool = False  # the next patch lies in the work tree for a person
    moved: dict[str, str] = field(
        default_factory=dict
    )  # the new patches, from when patches/ may have been written
    started: str = ""  # this repository's commit at the start, where it is one
    wrote: dict[str, str] = field(
        default_factory=dict
    )  # sha256 of what is written beside the patches, from before it is
    aborting: bool = False  # what was written is being put back
    gitlink: str = ""  # the submodule's commit in the index, before

    def as_text(self) -> str:
        """What state.json holds."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


@dataclass(frozen=True)
class Report:
    """What a finished rebase did."""

    old: str
    new: str
    done: tuple[Done, ...]
    range_diff: str
    kernels: tuple[str, ...]
    kernel_words: str
    submodule: str
    written: tuple[str, ...]
    removed: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)

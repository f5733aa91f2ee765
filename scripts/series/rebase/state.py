"""Where a rebase stands, as ``state.json`` keeps it, and what a finished one reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from scripts.base.documents import Document
from scripts.series import listing
from scripts.series.upstream.report import UpstreamChanges
from scripts.source.matrix_tables import Upstream

if TYPE_CHECKING:
    from pathlib import Path

GO_ON = "nox -s rebase -- --continue"
SKIP = "nox -s rebase -- --skip --reason 'WHY'"
USE = "nox -s rebase -- --use-remembered"
ABORT = "nox -s rebase -- --abort"
MATRIX_AND_CHANGES = ("wheel_matrix.toml", "CHANGES.md")  # written by the end of a rebase, with the series
STATE = "state.json"  # in the folder of a rebase


def under_way(folder: Path) -> bool:
    """Whether a folder holds a rebase that has not ended."""
    return (folder / STATE).exists()


class Done(Document):
    """A patch that was dealt with."""

    patch: str
    outcome: str
    commit: str  # on the new base; of the old series for one that was skipped
    reason: str = ""  # why it was skipped
    evidence: tuple[str, ...] = ()


class State(Document):
    """Where a rebase stands."""

    format: Literal[1] = 1
    upstream: str  # its name in wheel_matrix.toml
    series: str  # the folder of its patches
    own: str | None = None  # the folder of our own files
    own_files: dict[str, str] = Field(default_factory=dict)  # path to sha256, as it had them at the start
    old_pin: Upstream
    new_pin: Upstream
    old_base: str
    new_base: str
    tip: str
    patches: dict[str, str]  # name to sha256, as patches/ had them at the start
    landed: dict[str, tuple[str, str]]  # name to outcome and evidence
    done: tuple[Done, ...] = ()
    stopped: bool = False  # the next patch lies in the work tree for a person
    moved: dict[str, str] = Field(
        default_factory=dict
    )  # the new patches, from when patches/ may have been written
    started: str = ""  # this repository's commit at the start, where it is one
    wrote: dict[str, str] = Field(
        default_factory=dict
    )  # sha256 of what is written beside the patches, from before it is
    aborting: bool = False  # what was written is being put back
    gitlink: str = ""  # the submodule's commit in the index, before
    own_changed: tuple[str, ...] = ()  # of our own files those that the end of the rebase writes or removes

    @property
    def head(self) -> str:
        """The last patch's commit on the new base."""
        return next((d.commit for d in reversed(self.done) if not d.reason), self.new_base)

    @property
    def beside(self) -> tuple[str, ...]:
        """What the end of a rebase writes that is no patch."""
        own = (f"{self.own}/{name}" for name in self.own_changed)
        return (f"{self.series}/{listing.LISTING}", *MATRIX_AND_CHANGES, *own)

    @property
    def written(self) -> str:
        """What the end of a rebase writes, in words."""
        return ", ".join((self.series, *([self.own] if self.own else []), *MATRIX_AND_CHANGES))

    def but(self, **changes: Any) -> State:
        """The same with other values."""
        return self.model_copy(update=changes)

    def with_done(self, done: Done) -> State:
        """The same with one more patch dealt with, and nothing for a person to do."""
        return self.but(done=(*self.done, done), stopped=False)

    def as_text(self) -> str:
        """What state.json holds."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


class Report(Document):
    """What a finished rebase did."""

    old: str
    new: str
    done: tuple[Done, ...]
    series: tuple[str, ...]  # the patches as they are now, in order
    range_diff: str
    kernels: tuple[str, ...]
    kernel_words: str
    submodule: str
    written: tuple[str, ...]
    removed: tuple[str, ...]
    own: tuple[str, ...]  # our own files that changed
    upstream: UpstreamChanges  # what no merge shows

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return self.model_dump(mode="json")

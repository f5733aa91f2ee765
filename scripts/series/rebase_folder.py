"""The folder of a rebase: its state, and the work tree in which patches are moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.base import documents, files
from scripts.base.errors import SeriesError, UsageError
from scripts.base.git import Repository
from scripts.series import move
from scripts.series.rebase_state import ABORT, GO_ON, SKIP, STATE, State, under_way
from scripts.series.resolution import Stop

if TYPE_CHECKING:
    from pathlib import Path

_DROP = f"{ABORT} drops the rebase, patches/ is untouched"


@dataclass(frozen=True)
class Folder:
    """Where a rebase works."""

    root: Path  # of this repository
    path: Path

    @property
    def source(self) -> Path:
        """The work tree in which patches are moved."""
        return self.path / "source"

    @property
    def state_path(self) -> Path:
        """The file with the state."""
        return self.path / STATE

    @property
    def resolutions(self) -> Path:
        """What is remembered of conflicts, for every rebase."""
        return self.path.with_name("resolutions")

    @property
    def repository(self) -> Repository:
        """Of the work tree."""
        return Repository(self.source, SeriesError)

    def save(self, state: State) -> State:
        """Write the state; the same state."""
        files.write(self.state_path, state.as_text())
        return state

    def load(self) -> State:
        """The state, checked against the repository beside it.

        Raises:
            UsageError: no rebase is under way.
            SeriesError: the state is damaged, or the repository is not its.
        """
        if not under_way(self.path):
            raise UsageError("no rebase is under way; nox -s rebase -- VERSION starts one.")
        state = documents.read(State, self.state_path, error=SeriesError, remedy=_DROP)
        repository = self.repository
        if not repository.is_top_level():
            raise SeriesError(f"{self.source} is gone; {_DROP}.")
        for what, commit in (
            ("the old base", state.old_base),
            ("the new base", state.new_base),
            ("the old series", state.tip),
        ):
            if repository.attempt("cat-file", "-e", f"{commit}^{{commit}}")[0] != 0:
                raise SeriesError(f"{self.source} has lost {what}, {commit}; {_DROP}.")
        if repository.resolve("refs/series/backup") != state.tip:
            raise SeriesError(
                f"{self.source}: refs/series/backup is not the series that was to be moved; "
                f"{ABORT} drops the rebase."
            )
        return state

    def space(self, state: State) -> move.Workspace:
        """The work tree, with both bases and the series in it."""
        return move.Workspace(
            self.repository,
            state.old_base,
            state.tip,
            state.new_base,
            state.old_pin.version,
            state.new_pin.version,
        )

    def next_patch(self, state: State) -> tuple[str, str]:
        """The name of the patch to be moved next, and its commit in the old series."""
        place = len(state.done)
        return list(state.patches)[place], self.space(state).commits[place]

    def stop(self, state: State) -> Stop:
        """The patch to be moved next, as one that a person deals with."""
        name, commit = self.next_patch(state)
        return Stop(self.repository, name, commit, state.head, GO_ON, SKIP)

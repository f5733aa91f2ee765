"""The folder of a rebase: its state, and the work tree in which patches are moved."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import documents, files
from scripts.base.errors import ActionNeeded, SeriesError, UsageError
from scripts.base.git import Repository
from scripts.series import ground, tree
from scripts.series.rebase.resolution import Stop
from scripts.series.rebase.state import ABORT, GO_ON, SKIP, STATE, State, under_way
from scripts.series.upstream import move

if TYPE_CHECKING:
    from collections.abc import Iterable


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

    @property
    def _drop(self) -> str:
        """How to get rid of a rebase whose state is damaged, in words."""
        kept = self.path.with_name(f"{self.path.name}-aborted") / "before"
        began = (self.path / "before").is_dir()
        after = (
            f"what it began to write is to be taken back from {kept}" if began else "patches/ is untouched"
        )
        return f"{ABORT} drops the rebase, {after}"

    def load(self) -> State:
        """The state, checked against the repository beside it.

        Raises:
            UsageError: no rebase is under way.
            SeriesError: the state is damaged, or the repository is not its.
        """
        if not under_way(self.path):
            raise UsageError("no rebase is under way; nox -s rebase -- VERSION starts one.")
        state = documents.read(State, self.state_path, error=SeriesError, remedy=self._drop)
        repository = self.repository
        if not repository.is_top_level():
            raise SeriesError(f"{self.source} is gone; {self._drop}.")
        for what, commit in (
            ("the old base", state.old_base),
            ("the new base", state.new_base),
            ("the old series", state.tip),
        ):
            if repository.attempt("cat-file", "-e", f"{commit}^{{commit}}")[0] != 0:
                raise SeriesError(f"{self.source} has lost {what}, {commit}; {self._drop}.")
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
            state.new_pin.version,
        )

    def next_patch(self, state: State) -> tuple[str, str]:
        """The name of the patch to be moved next, and its commit in the old series."""
        place = len(state.done)
        return list(state.patches)[place], self.space(state).commits[place]

    def gone(self, state: State) -> set[str]:
        """The files of the old release that the new one has not, and that were none of ours."""
        old, new = (ground.upstream_of(self.repository, base) for base in (state.old_base, state.new_base))
        return {*self.repository.files(old)} - {*self.repository.files(new)} - state.own_files.keys()

    def stop(self, state: State) -> Stop:
        """The patch to be moved next, as one that a person deals with."""
        name, commit = self.next_patch(state)
        return Stop(self.repository, name, commit, state.head, GO_ON, SKIP)


def refuse_gone(folder: Folder, state: State, there: Iterable[str], *, stopped: bool) -> None:
    """Refuse files that upstream has no more: with the hook's changes they would become files of ours.

    ``stopped``: at a patch, which can be left out, rather than at the end.

    Raises:
        ActionNeeded: one is there.
    """
    if state.own and (kept := sorted(folder.gone(state) & set(there))):
        names = " ".join(kept)
        raise ActionNeeded(
            f"{state.new_pin.version} has no {', '.join(kept)}, which {state.old_pin.version} had; it would "
            f"become a file of {state.own}. Put the patch's change where the code is now, delete the file "
            f"(git -C {folder.source} rm {names}; git rebase -i where a commit has it), then {GO_ON}; or "
            + (f"{SKIP}, where nothing of the patch is left; or " if stopped else "")
            + f"{ABORT}."
        )


def remove(folder: Folder) -> None:
    """The folder goes in one step, so that a kill leaves a rebase or none."""
    place = tempfile.mkdtemp(dir=folder.path.parent, prefix=tree.temporary_prefix(folder.path))
    folder.path.replace(Path(place) / "gone")
    shutil.rmtree(place)

"""Where an edit of a patch stands, noted in the repository of the tree that it changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from scripts.base import documents, files
from scripts.base.documents import Document
from scripts.base.errors import SeriesError, UsageError
from scripts.series.places import command

if TYPE_CHECKING:
    from pathlib import Path

_NAME = "series-edit.json"  # in the repository's .git


class Edit(Document):
    """Where an edit stands."""

    format: Literal[1] = 1
    branch: str  # that HEAD was; empty where it was none. It stays where it is until the end.
    tip: str  # HEAD, before
    patches: tuple[tuple[str, str], ...]  # name and commit of each, before
    place: int  # of the patch that is edited
    arrived: bool = False  # its files are in the work tree
    done: tuple[str, ...] = ()  # commits of that patch and those after it; empty for one that was left out
    stopped: bool = False  # the next one lies in the work tree for a person

    @property
    def name(self) -> str:
        """The patch that is edited."""
        return self.patches[self.place][0]

    @property
    def commit(self) -> str:
        """The same, as it was."""
        return self.patches[self.place][1]

    @property
    def head(self) -> str:
        """The last commit that was made anew."""
        return next(commit for commit in reversed(self.done) if commit)

    @property
    def next(self) -> int:
        """The place of the patch to be replayed next."""
        return self.place + len(self.done)

    def but(self, **changes: Any) -> Edit:
        """The same with other values."""
        return self.model_copy(update=changes)


@dataclass(frozen=True)
class Words:
    """The commands that go on with the edit of a tree, as a user types them."""

    root: Path

    @property
    def begin(self) -> str:
        """Begins one."""
        return command("edit", self.root, "PATCH")

    @property
    def abort(self) -> str:
        """Goes back."""
        return command("edit", self.root, "--abort")

    @property
    def refresh(self) -> str:
        """Goes on."""
        return command("refresh", self.root)

    @property
    def skip(self) -> str:
        """Leaves out the patch that stopped the replay."""
        return command("refresh", self.root, "--skip")

    @property
    def use(self) -> str:
        """Takes what is remembered."""
        return command("refresh", self.root, "--use-remembered")

    @property
    def none(self) -> str:
        """That there is no edit."""
        return f"no patch is being edited; {self.begin} begins"


def under_way(root: Path) -> bool:
    """Whether a patch of a tree is being edited."""
    return (root / ".git" / _NAME).is_file()


def load(root: Path) -> Edit:
    """Where the edit stands.

    Raises:
        UsageError: there is none.
        SeriesError: the note is damaged.
    """
    if not under_way(root):
        raise UsageError(f"{Words(root).none}.")
    anew = command("apply", root, "--reset")
    remedy = f"{anew} makes the tree anew, and keeps its commits under refs/replaced"
    return documents.read(Edit, root / ".git" / _NAME, error=SeriesError, remedy=remedy)


def save(root: Path, edit: Edit) -> Edit:
    """Write it; the same."""
    files.write(root / ".git" / _NAME, edit.model_dump_json() + "\n")
    return edit


def remove(root: Path) -> None:
    """The edit is over."""
    (root / ".git" / _NAME).unlink(missing_ok=True)

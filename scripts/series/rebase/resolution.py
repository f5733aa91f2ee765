"""What a person made of the patch that stopped a rebase or an edit: taken when it is whole, else refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.base.errors import ActionNeeded
from scripts.series import unfinished

if TYPE_CHECKING:
    from scripts.base.git import Repository


@dataclass(frozen=True)
class Stop:
    """A patch that lies in a work tree for a person."""

    repository: Repository
    name: str
    commit: str  # the patch as it was
    before: str  # the commit that it is to stand on
    go_on: str  # the command that takes the resolution
    leave_out: str  # the one that leaves the patch out

    @property
    def open_files(self) -> list[str]:
        """The files that git has a conflict in."""
        listed = self.repository.run("diff", "--name-only", "--diff-filter=U", "-z", writes=False)
        return [name for name in listed.split("\0") if name]


def take(stop: Stop) -> str:
    """The commit that resolves a stop.

    Raises:
        ActionNeeded: it is not one commit on the patch before, or conflict markers are left in it.
    """
    repository, name, source = stop.repository, stop.name, stop.repository.root
    head = repository.resolve("HEAD")
    if unfinished.is_picking(source):
        _stage(stop)
        # Not cherry-pick --continue: it drops lines of the message that begin with #.
        repository.run("commit", "--quiet", "--cleanup=verbatim", f"--reuse-message={stop.commit}")
        head = repository.resolve("HEAD")
    elif operation := unfinished.in_progress(source):
        raise ActionNeeded(f"{source} is in the middle of a {operation}; finish it there, then {stop.go_on}.")
    elif repository.run("status", "--porcelain").strip():
        raise ActionNeeded(f"{source} has uncommitted changes; commit them as {name}, then {stop.go_on}.")
    if head == stop.before:
        raise ActionNeeded(
            f"{name} has no commit in {source}. Commit it there (git cherry-pick {stop.commit[:12]} begins "
            f"it again), or leave it out: {stop.leave_out}."
        )
    parents = repository.run("log", "-1", "--format=%P", head, writes=False).split()
    if parents != [stop.before]:
        raise ActionNeeded(
            f"{source}: HEAD is to be one commit, {name}, on {stop.before[:12]}. "
            f"Put it there (git rebase -i), then {stop.go_on}."
        )
    if not repository.run("diff", "--name-only", stop.before, head, writes=False):
        raise ActionNeeded(
            f"{name}: the commit in {source} changes nothing. If that is right: {stop.leave_out}."
        )
    _refuse_markers(stop, stop.before, head)
    return head


def refuse_unknown(repository: Repository, name: str, go_on: str) -> None:
    """Refuse files that git does not know: an editor's copies are no part of a patch."""
    status = repository.run("status", "--porcelain", "--untracked-files=all")
    if unknown := [line[3:] for line in status.splitlines() if line.startswith("??")]:
        raise ActionNeeded(
            f"{repository.root} has files that git does not know: {', '.join(unknown)}. "
            f"Delete them, or git add them to {name}, then {go_on}."
        )


def _stage(stop: Stop) -> None:
    """Add what a person resolved; refuse leftovers."""
    repository, name = stop.repository, stop.name
    # Before anything is staged: git forgets what a conflict was then.
    _refuse_markers(stop)
    repository.run("add", "--update")
    refuse_unknown(repository, name, stop.go_on)
    _refuse_markers(stop, "--cached", "HEAD")
    if not repository.run("diff", "--cached", "--name-only", writes=False):
        raise ActionNeeded(f"{name} would leave nothing. If that is right: {stop.leave_out}.")


def _refuse_markers(stop: Stop, *between: str) -> None:
    _, report, _ = stop.repository.attempt("diff", "--check", *between)
    if places := re.findall(r"^(.+:\d+): leftover conflict marker", report, re.MULTILINE):
        raise ActionNeeded(
            f"{stop.repository.root}/{places[0]}: a conflict of {stop.name} is not resolved. "
            f"Edit the file, then {stop.go_on}."
        )

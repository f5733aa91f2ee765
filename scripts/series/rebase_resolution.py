"""What a person made of the patch that stopped a rebase: taken when it is whole, else refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from scripts.base.errors import ActionNeeded
from scripts.series import tree as work_tree
from scripts.series.rebase_state import GO_ON, SKIP, Done, State

if TYPE_CHECKING:
    from scripts.base.git import Repository
    from scripts.series.rebase_folder import Folder


def take_resolution(folder: Folder, state: State) -> State:
    """Record the resolution of the next patch.

    Raises:
        ActionNeeded: it is not one commit on the patch before, or conflict markers are left in it.
    """
    repository, source = folder.repository, folder.source
    name, commit = folder.next_patch(state)
    head, before = repository.resolve("HEAD"), state.head
    if work_tree.in_progress(source):
        _stage(repository, name)
        repository.run("-c", "core.editor=true", "cherry-pick", "--continue")
        head = repository.resolve("HEAD")
    elif repository.run("status", "--porcelain").strip():
        raise ActionNeeded(f"{source} has uncommitted changes; commit them as {name}, then {GO_ON}.")
    if head == before:
        raise ActionNeeded(
            f"{name} has no commit in {source}. Commit it there (git cherry-pick {commit[:12]} begins it "
            f"again), or say why it is left out: {SKIP}."
        )
    parents = repository.run("log", "-1", "--format=%P", head, writes=False).split()
    if parents != [before]:
        raise ActionNeeded(
            f"{source}: HEAD is to be one commit, {name}, on {before[:12]}. "
            f"Put it there (git rebase -i), then {GO_ON}."
        )
    if not repository.run("diff", "--name-only", before, head, writes=False):
        raise ActionNeeded(
            f"{name}: the commit in {source} changes nothing. If that is right, say why: {SKIP}."
        )
    _refuse_markers(repository, name, before, head)
    return folder.save(state.with_done(Done(patch=name, outcome="resolved", commit=head)))


def _stage(repository: Repository, name: str) -> None:
    """Add what a person resolved; refuse leftovers."""
    # Before anything is staged: git forgets what a conflict was then.
    _refuse_markers(repository, name)
    repository.run("add", "--update")
    status = repository.run("status", "--porcelain", "--untracked-files=all")
    unknown = [line[3:] for line in status.splitlines() if line.startswith("??")]
    if unknown:
        raise ActionNeeded(
            f"{repository.root} has files that git does not know: {', '.join(unknown)}. "
            f"Delete them, or git add them to {name}, then {GO_ON}."
        )
    _refuse_markers(repository, name, "--cached", "HEAD")
    if not repository.run("diff", "--cached", "--name-only", writes=False):
        raise ActionNeeded(f"{name} would leave nothing. If that is right, say why: {SKIP}.")


def _refuse_markers(repository: Repository, name: str, *between: str) -> None:
    _, report, _ = repository.attempt("diff", "--check", *between)
    if places := re.findall(r"^(.+:\d+): leftover conflict marker", report, re.MULTILINE):
        raise ActionNeeded(
            f"{repository.root}/{places[0]}: a conflict of {name} is not resolved. "
            f"Edit the file, then {GO_ON}."
        )

"""What is not finished in a work tree: an operation of git's, an edit of a patch, a HEAD on no branch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.base.git import BRANCH
from scripts.series import edit_state

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from scripts.base.git import Repository

_PICK = "CHERRY_PICK_HEAD"
_OPERATIONS = {
    "rebase-merge": "rebase",
    "rebase-apply": "am or rebase",
    _PICK: "cherry-pick",
    "REVERT_HEAD": "revert",
    "MERGE_HEAD": "merge",
    "sequencer": "cherry-pick or revert of several commits",
    "BISECT_LOG": "bisect",
}


def in_progress(root: Path) -> str | None:
    """The operation of git's that was not finished in a work tree."""
    return next((what for name, what in _OPERATIONS.items() if (root / ".git" / name).exists()), None)


def is_picking(root: Path) -> bool:
    """Whether a commit lies in a work tree that was to be picked, as a rebase and an edit do it."""
    return (root / ".git" / _PICK).exists()


def in_words(root: Path) -> str | None:
    """That an operation was not finished, and what to do about it, in words."""
    if edit_state.under_way(root):
        words = edit_state.Words(root)
        return f"{root} is in the middle of an edit of a patch; {words.refresh}, or {words.abort}"
    operation = in_progress(root)
    how = (
        f"git -C {root} bisect reset ends it"
        if operation == "bisect"
        else "finish it there (git status tells how), or abort it"
    )
    return f"{root} is in the middle of a {operation}; {how}" if operation else None


def _counted(count: int) -> str:
    return f"{count} commit{'s' * (count != 1)}"


def off_branch(repository: Repository) -> str | None:
    """That HEAD is on no branch, and the way back to one, in words; None where it is on one."""
    root = repository.root
    if repository.attempt("symbolic-ref", "--quiet", "HEAD")[0] == 0:
        return None
    told = f"{root}: HEAD is on no branch: it is {repository.resolve('HEAD')[:12]}"
    branch = _branch_before(repository)
    make_it = f"git -C {root} checkout -B {branch} makes that {branch}"
    if repository.attempt("rev-parse", "--verify", "--quiet", f"refs/heads/{branch}")[0] != 0:
        return f"{told}. {make_it}"
    lacking, more = (
        len(repository.commits(f"refs/heads/{branch}")),
        len(repository.commits("HEAD", f"refs/heads/{branch}")),
    )
    go_back = f"git -C {root} checkout {branch} goes back"
    if not more:
        return f"{told}. {make_it}"
    if not lacking:
        return f"{told}, and {branch} has {more} more commit{'s' * (more != 1)}. {go_back}"
    lacks = f"which has {_counted(lacking)} that {branch} lacks, and lacks {_counted(more)} of {branch}"
    return f"{told}, {lacks}. {go_back}; {make_it}"


def _branch_before(repository: Repository) -> str:
    """The branch that HEAD was on last."""
    status, ref, _ = repository.attempt("rev-parse", "--symbolic-full-name", "--verify", "--quiet", "@{-1}")
    name = ref.strip().removeprefix("refs/heads/")
    return name if status == 0 and name and name != ref.strip() else BRANCH


def held_elsewhere(repository: Repository, removed: Iterable[str]) -> str | None:
    """That the series' branch has patches that HEAD, on another one, lacks; None where it has not.

    ``removed``: the patches that an export of HEAD would remove.
    """
    names, root, ref = sorted(removed), repository.root, f"refs/heads/{BRANCH}"
    here = repository.run("symbolic-ref", "--short", "HEAD", writes=False).strip()
    lacks = repository.attempt("merge-base", "--is-ancestor", ref, "HEAD")[0] == 1  # 128: there is none
    if here == BRANCH or not names or not lacks:
        return None
    return (
        f"{root} is on the branch {here}, whose export would remove {', '.join(names)}, which {BRANCH} still "
        f"has. git -C {root} checkout {BRANCH} goes back; git -C {root} checkout -B {BRANCH} makes the "
        f"series what {here} is"
    )

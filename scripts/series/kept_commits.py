"""The commits of a tree that is replaced: the new tree's repository keeps them, and nobody's work is lost."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from scripts.base import console, files
from scripts.base.errors import SeriesError
from scripts.base.git import Repository

if TYPE_CHECKING:
    from pathlib import Path

# Where the last commit of a branch of the series is noted: what stands on it is somebody's work, and no more.
PUBLISHED = "refs/published"


REPLACED = "refs/replaced/*"  # all that are kept
# What was kept before, and by edits that were dropped, whose last words name them.
_KEEP_THEIR_NAMES = (REPLACED, "refs/series/aborted/*", "refs/series/moved/*")
# Without the second, git leaves out without a word what stands on a history that is not there.
_FETCH = ("--quiet", "--update-shallow", "--no-tags")


def place(kind: str) -> str:
    """A ref that nothing has yet, by the time."""
    return f"refs/{kind}/{datetime.now(timezone.utc):%Y%m%d-%H%M%S-%f}"


def loose_commit(repository: Repository) -> str | None:
    """A commit of what a tree holds besides its HEAD; None where that is nothing.

    The index is made anew: what git does not show (assume-unchanged, excludes) is somebody's work too.
    """
    repository.attempt("-c", "core.sparseCheckout=false", "read-tree", "HEAD")
    repository.attempt("add", "--all", "--force")
    if repository.attempt("diff", "--cached", "--quiet", "HEAD")[0] == 0:
        return None
    tree = repository.run("write-tree").strip()
    return repository.run("commit-tree", "-p", "HEAD", "-m", "what was not committed", tree).strip()


def keep_tips(repository: Repository, *commits: str) -> None:
    """Keep commits that a tree had under a ref of their own: no branch may hold them any more."""
    kept_under = place("replaced")
    for number, commit in enumerate(dict.fromkeys(commits)):
        repository.run("update-ref", f"{kept_under}/tips/{number}", commit)


def keep_commits(repository: Repository, old: Path, name: Path | None = None) -> str:
    """Take over the commits of a tree that is replaced, its linked work trees' and stashes too.

    Returns the ref that they are under. Exported commits may be in no patch any more. ``name``: of the
    tree, where ``old`` is aside by now.

    Raises:
        SeriesError: they could not be taken over.
    """
    kept_under = place("replaced")
    former = Repository(old, SeriesError)
    if loose := loose_commit(former):
        former.run("update-ref", "refs/uncommitted", loose)
        console.warn(
            f"{name or old} had changes that were not committed; they are kept as the commit "
            f"{kept_under}/uncommitted"
        )
    for number, stash in enumerate(former.run("stash", "list", "--format=%H", writes=False).split()):
        former.run("update-ref", f"refs/stashes/{number}", stash)
    linked = re.findall(
        r"^HEAD (\w+)$", former.run("worktree", "list", "--porcelain", writes=False), re.MULTILINE
    )
    for number, head in enumerate(linked):
        former.run("update-ref", f"refs/linked/{number}", head)
    names = ("heads/*", "stashes/*", "linked/*", "tags/*", *(["uncommitted"] if loose else []))
    heads = [f"+HEAD:{kept_under}/HEAD", *(f"+refs/{name}:{kept_under}/{name}" for name in names)]
    heads += [f"+{name}:{name}" for name in _KEEP_THEIR_NAMES]
    status, _, err = repository.attempt("fetch", *_FETCH, str(old), *heads)
    if status != 0:
        raise SeriesError(f"{old}: its commits could not be taken over, so it was left as it is:\n{err}")
    _keep_published(repository, former)
    return kept_under


def published(repository: Repository) -> list[str]:
    """The names of the branches of the series that were made, whether they are still there or not."""
    options = ("--format=%(refname:lstrip=2)", PUBLISHED)
    return repository.run("for-each-ref", *options, writes=False).splitlines()


def checked_out(repository: Repository, known: str) -> str:
    """That HEAD is such a branch and not the tree's own, in words; empty where it is none.

    ``known``: the tree's last commit.
    """
    root, (_, branch, _) = repository.root, repository.attempt("symbolic-ref", "--quiet", "--short", "HEAD")
    if branch.strip() not in published(repository):
        return ""
    there = ("--points-at", known, "--format=%(refname:short)", "refs/heads")
    back = repository.run("for-each-ref", *there, writes=False).splitlines() or [known[:12]]
    return f"{root} has {branch} checked out, which nox -s export made; git -C {root} checkout {back[0]}"


def _keep_published(repository: Repository, former: Repository) -> None:
    """Take over the branches of the series, with what stands on them."""
    for name in published(former):
        refs = (f"+refs/heads/{name}:refs/heads/{name}", f"+{PUBLISHED}/{name}:{PUBLISHED}/{name}")
        repository.attempt("fetch", *_FETCH, str(former.root), *refs)


def put_in_place(work: Path, root: Path) -> None:
    """Rename a finished tree to ``root``; what was there is replaced, and its commits are kept."""
    if not root.exists():
        work.replace(root)
        return
    kept_under = keep_commits(Repository(work, SeriesError), root)
    files.exchange(work, root)
    console.note(f"{root} was made anew; the commits that it had are kept there as {kept_under}")

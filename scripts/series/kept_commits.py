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
        former.run("update-ref", "refs/heads/uncommitted", loose)
        console.warn(
            f"{name or old} had changes that were not committed; they are kept as the commit "
            f"{kept_under}/heads/uncommitted"
        )
    for number, stash in enumerate(former.run("stash", "list", "--format=%H", writes=False).split()):
        former.run("update-ref", f"refs/stashes/{number}", stash)
    linked = re.findall(
        r"^HEAD (\w+)$", former.run("worktree", "list", "--porcelain", writes=False), re.MULTILINE
    )
    for number, head in enumerate(linked):
        former.run("update-ref", f"refs/linked/{number}", head)
    names = (
        ("HEAD", "HEAD"),
        ("refs/heads/*", "heads/*"),
        ("refs/stashes/*", "stashes/*"),
        ("refs/linked/*", "linked/*"),
    )
    heads = [f"+{name}:{kept_under}/{kept}" for name, kept in names]
    status, _, err = repository.attempt("fetch", "--quiet", "--no-tags", str(old), *heads)
    if status != 0:
        raise SeriesError(f"{old}: its commits could not be taken over, so it was left as it is:\n{err}")
    repository.attempt(
        "fetch",
        "--quiet",
        "--no-tags",
        str(old),
        f"+refs/tags/*:{kept_under}/tags/*",
        "+refs/replaced/*:refs/replaced/*",
    )
    _keep_published(repository, former)
    return kept_under


def _keep_published(repository: Repository, former: Repository) -> None:
    """Take over the branches of the series, with what stands on them."""
    names = former.run("for-each-ref", "--format=%(refname:lstrip=2)", PUBLISHED, writes=False).split()
    for name in names:
        refs = (f"+refs/heads/{name}:refs/heads/{name}", f"+{PUBLISHED}/{name}:{PUBLISHED}/{name}")
        repository.attempt("fetch", "--quiet", "--no-tags", str(former.root), *refs)


def put_in_place(work: Path, root: Path) -> None:
    """Rename a finished tree to ``root``; what was there is replaced, and its commits are kept."""
    if not root.exists():
        work.replace(root)
        return
    kept_under = keep_commits(Repository(work, SeriesError), root)
    files.exchange(work, root)
    console.note(f"{root} was made anew; the commits that it had are kept there as {kept_under}")

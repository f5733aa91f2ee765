"""What a commit of upstream is called: a release where its tag says so, else a version of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from packaging.version import Version

if TYPE_CHECKING:
    from scripts.base.git import Repository

_DIGITS = 8  # of the commit's id


def named(repository: Repository, commit: str, version: str) -> tuple[str, str | None]:
    """The version of a commit, and its tag if it is a release.

    Args:
        repository: upstream's.
        commit: its id.
        version: ``__version__`` of its files: of the release that it is, or after which it comes, or that it
            leads to.
    """
    tag = f"v{version}"
    tagged = _tagged(repository, tag)
    if tagged is None:
        repository.attempt("fetch", "--quiet", "--tags", "origin")
        tagged = _tagged(repository, tag)
    if tagged == commit:
        return version, tag
    after = tagged is not None and repository.attempt("merge-base", "--is-ancestor", tagged, commit)[0] == 0
    return development(version, commit, released=after), None


def _tagged(repository: Repository, tag: str) -> str | None:
    status, out, _ = repository.attempt("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
    return out.strip() if status == 0 else None


def development(version: str, commit: str, *, released: bool) -> str:
    """A version that no release has, before the next one and after what was released.

    >>> development("2.8.4", "0251105a" + "0" * 32, released=False)
    '2.8.4.dev0+g0251105a'
    >>> development("2.8.3.post1", "0251105a" + "0" * 32, released=True)
    '2.8.3.post2.dev0+g0251105a'
    """
    parsed = Version(version)
    public = parsed.public
    if released:
        public = f"{parsed.base_version}.post{(parsed.post or 0) + 1}"
    return f"{public}.dev0+g{commit[:_DIGITS]}"


def commit_in(version: str) -> str | None:
    """The beginning of the commit's id that such a version has.

    >>> commit_in("2.8.4.dev0+g0251105a"), commit_in("2.8.3")
    ('0251105a', None)
    """
    found = re.search(r"\.dev0\+g([0-9a-f]{8,40})$", version)
    return found[1] if found else None

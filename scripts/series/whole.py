"""What must hold of the whole tree, and does before any patch too, so that no guard can be it.

Features declare it, each check with what a person is to read where it fails (``holds`` in fork/NAME.toml).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.base.errors import GuardError, SeriesError
from scripts.base.git import Repository
from scripts.series import guards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.series.features import Features
    from scripts.series.guards import Guard
    from scripts.series.tree import Commits


@dataclass(frozen=True)
class Held:
    """What one check said."""

    feature: str
    guard: Guard
    passed: bool
    where: str  # FILE:LINE of its declaration
    read: str  # what a person is to read where it fails
    output: str = ""  # of a test that failed


def run(features: Features | None, tree: Commits) -> list[Held]:
    """Run what features declare, on a tree with the whole series.

    Raises:
        GuardError: a declaration is malformed, or pytest cannot run it.
    """
    if features is None:
        return []
    repository = Repository(tree.root, SeriesError)
    found = []
    for name, text, read in features.holds:
        where = f"{features.path}:{features.line(name, 'holds', text)}"
        try:
            guard = guards.parse(f"test {text}")
        except ValueError as e:
            raise GuardError(f"{where}: holds {text!r}: {e}.") from e
        passed, output = guards.check_test(guard, repository, tree.commit)
        found.append(Held(name, guard, passed, where, " ".join(read.split()), "" if passed else output))
    return found


def faults(found: Sequence[Held]) -> list[str]:
    """Each check that failed: where it is declared, what to read, what its test said."""
    return [
        f"{held.where}: {held.guard} fails on the whole series, and feature {held.feature} needs it. "
        f"{held.read}\n{held.output}"
        for held in found
        if not held.passed
    ]

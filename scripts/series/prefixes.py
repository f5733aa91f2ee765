"""Run a command, or another check, after every prefix of the series; find where it begins to fail."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console
from scripts.base.errors import SeriesError, UsageError
from scripts.base.git import Repository

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scripts.series.model import Series
    from scripts.series.tree import Commits

UNTESTABLE = 125  # an exit status, as in git bisect run
NOT_FOUND = 127
_BASE = "base"  # upstream alone


@dataclass(frozen=True)
class Check:
    """What is asked of each prefix."""

    what: str  # in words
    run: Callable[[Path, str], int]  # takes a tree, and the name of its last patch; a status as a command's


@dataclass(frozen=True)
class Run:
    """What the command said of one prefix."""

    patch: str  # the last of the prefix; "base" for upstream alone
    status: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether it succeeded."""
        return self.status == 0

    @property
    def what(self) -> str:
        """The prefix in words."""
        return "upstream itself, without any patch" if self.patch == _BASE else self.patch


def shell(command: str) -> Check:
    """A command as a user types it, which runs in the tree; one that is not there is an error."""

    def run(folder: Path, name: str) -> int:
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {
            "FA2_PATCH": name,
            "FA2_SOURCE": str(folder),
        }
        # A shell, because that is what a user types. Its output goes to stderr: stdout is ours, for --json.
        status = subprocess.run(command, shell=True, cwd=folder, env=env, check=False, stdout=sys.stderr)  # noqa: S602
        if status.returncode == NOT_FOUND:
            raise UsageError(f"{command!r}: the shell did not find the command (127).")
        return status.returncode

    return Check(command, run)


def _runner(series: Series, tree: Commits, check: Check, folder: Path) -> Callable[[int], Run]:
    names = [_BASE, *(p.name for p in series.patches)]
    origin = Repository(tree.root, SeriesError)
    commits = [tree.base, *origin.commits(tree.base, tree.commit)]
    repository = origin.shared_copy(folder)

    def run(place: int) -> Run:
        repository.run("checkout", "--quiet", "--force", "--detach", commits[place])
        repository.run("clean", "--quiet", "--force", "-d", "-x")
        console.step(f"{names[place]}: {check.what}")
        started = time.monotonic()
        result = Run(names[place], check.run(folder, names[place]), time.monotonic() - started)
        verdict = (
            "passes"
            if result.passed
            else "cannot be tested (125)"
            if result.status == UNTESTABLE
            else f"exits with {result.status}"
        )
        console.note(f"{verdict}, {console.duration(result.seconds)}")
        return result

    return run


def at(series: Series, tree: Commits, check: Check, build: Path, places: Sequence[int]) -> list[Run]:
    """Check prefixes of these lengths: 0 is upstream with our own files, and no patch."""
    with _workspace(build) as folder:
        run = _runner(series, tree, check, Path(folder) / "source")
        return [run(place) for place in places]


def bisect(series: Series, tree: Commits, command: str, build: Path) -> tuple[str | None, list[Run]]:
    """The first patch at which it fails, and the runs that show it; None when the whole series passes.

    Raises:
        UsageError: it fails on upstream alone, or 125 leaves more than one patch to blame.
    """
    with _workspace(build) as folder:
        run = _runner(series, tree, shell(command), Path(folder) / "source")
        runs = [run(len(series.patches))]
        if runs[0].passed:
            return None, runs
        runs.append(run(0))
        if runs[1].status == UNTESTABLE:
            raise UsageError(
                f"{command!r} cannot be tested on upstream without any patch (125); "
                "there is no passing end to start from."
            )
        if not runs[1].passed:
            raise UsageError(
                f"{command!r} fails on upstream without any patch (status {runs[1].status}); "
                "no patch is to blame."
            )
        good, bad, untestable = 0, len(series.patches), set[int]()
        while candidates := [i for i in range(good + 1, bad) if i not in untestable]:
            place = candidates[len(candidates) // 2]
            runs.append(run(place))
            if runs[-1].status == UNTESTABLE:
                untestable.add(place)
            elif runs[-1].passed:
                good = place
            else:
                bad = place
        if bad - good > 1:
            raise UsageError(
                f"one of {', '.join(p.name for p in series.patches[good:bad])}; "
                "those before the last could not be tested (125)."
            )
        return series.patches[bad - 1].name, runs


def _workspace(build: Path) -> tempfile.TemporaryDirectory[str]:
    build.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=build, prefix="steps-")

"""Run a command after every prefix of the series; find the patch at which it begins to fail."""

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
    from collections.abc import Callable

    from scripts.series.model import Series
    from scripts.series.tree import Commits

UNTESTABLE = 125  # an exit status, as in git bisect run
NOT_FOUND = 127
_BASE = "base"  # upstream alone


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


def _runner(series: Series, tree: Commits, command: str, folder: Path) -> Callable[[int], Run]:
    names = [_BASE, *(p.name for p in series.patches)]
    origin = Repository(tree.root, SeriesError)
    commits = [tree.base, *origin.commits(tree.base, tree.commit)]
    origin.run("clone", "--quiet", "--shared", "--no-checkout", str(tree.root), str(folder), writes=False)
    repository = Repository(folder, SeriesError)

    def run(place: int) -> Run:
        repository.run("checkout", "--quiet", "--force", "--detach", commits[place])
        repository.run("clean", "--quiet", "--force", "-d", "-x")
        console.step(f"{names[place]}: {command}")
        started = time.monotonic()
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {
            "FA2_PATCH": names[place],
            "FA2_SOURCE": str(folder),
        }
        # A shell, because that is what a user types. Its output goes to stderr: stdout is ours, for --json.
        done = subprocess.run(command, shell=True, cwd=folder, env=env, check=False, stdout=sys.stderr)  # noqa: S602
        result = Run(names[place], done.returncode, time.monotonic() - started)
        if result.status == NOT_FOUND:
            raise UsageError(f"{command!r}: the shell did not find the command (127).")
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


def each(series: Series, tree: Commits, command: str, build: Path) -> list[Run]:
    """Run it on upstream alone and after each patch."""
    with _workspace(build) as folder:
        run = _runner(series, tree, command, Path(folder) / "source")
        return [run(place) for place in range(len(series.patches) + 1)]


def bisect(series: Series, tree: Commits, command: str, build: Path) -> tuple[str | None, list[Run]]:
    """The first patch at which it fails, and the runs that show it; None when the whole series passes.

    Raises:
        UsageError: it fails on upstream alone, or 125 leaves more than one patch to blame.
    """
    with _workspace(build) as folder:
        run = _runner(series, tree, command, Path(folder) / "source")
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

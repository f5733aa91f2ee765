"""Do what comes before a release, step by step, and remember what is done.

A step that is done is not done again, for the same commit, the same options and the same files.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from scripts.base import console, documents, files
from scripts.base.documents import Document
from scripts.base.errors import BuildError, NotVerified, UsageError
from scripts.base.fetch import sha256
from scripts.base.git import Repository

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

STATE = "state.json"


class ReleaseError(BuildError):
    """A step of a release failed."""


@dataclass(frozen=True)
class Step:
    """One step: what it does, what it takes, and how; it returns the files that it makes."""

    name: str
    line: str
    run: Callable[[], Iterable[Path]]
    takes: Callable[[], Iterable[Path]] = tuple
    options: tuple[str, ...] = ()


class Done(Document):
    """A step that was done."""

    asked: str  # a digest of the commit, the options and what it took
    made: dict[str, str]  # the sha256 of each file
    seconds: float


class State(Document):
    """What is done: ``state.json``."""

    format: Literal[1]
    steps: dict[str, Done] = Field(default_factory=dict)


def commit_of(root: Path) -> str:
    """The commit that is released.

    Raises:
        UsageError: the work tree has other files than it.
    """
    repository = Repository(root, UsageError)
    if not repository.is_top_level():
        raise UsageError(f"{root} is no clone; a release is of a commit.")
    if changed := repository.run("status", "--porcelain", writes=False).splitlines():
        raise UsageError(
            f"a release is of a commit, and the work tree has changes: {changed[0]}. Commit them."
        )
    return repository.resolve("HEAD")


def run(steps: Sequence[Step], commit: str, folder: Path, *, rehearsal: bool) -> list[NotVerified]:
    """Do the steps in order.

    Args:
        steps: what to do.
        commit: the release's.
        folder: where it is remembered.
        rehearsal: go on where a wheel could not be proved.

    Returns:
        What a rehearsal went on without.

    Raises:
        BuildError: a step failed; those before it are remembered.
    """
    waiting = []
    for place, step in enumerate(steps, 1):
        console.step(f"{place}/{len(steps)} {step.name}: {step.line}")
        asked, before = _asked(step, commit), read(folder).steps.get(step.name)
        if before is not None and _is_done(before, asked):
            console.done(f"{step.name} was done before, in {console.duration(before.seconds)}")
            continue
        started = time.monotonic()
        try:
            made = {str(path): sha256(path) for path in step.run()}
        except NotVerified as e:
            if not rehearsal:
                raise
            console.warn(str(e))
            waiting.append(e)
            continue
        except BuildError:
            console.warn(f"{step.name} failed. The same command goes on from there.")
            raise
        _remember(folder, step.name, Done(asked=asked, made=made, seconds=time.monotonic() - started))
    return waiting


def read(folder: Path) -> State:
    """What is done so far."""
    if not (folder / STATE).is_file():
        return State(format=1)
    return documents.read(State, folder / STATE, error=UsageError, remedy="delete it; the steps begin anew")


def _remember(folder: Path, name: str, done: Done) -> None:
    state = read(folder)
    folder.mkdir(parents=True, exist_ok=True)
    told = state.model_copy(update={"steps": {**state.steps, name: done}})
    files.write(folder / STATE, told.model_dump_json(indent=1) + "\n")


def _asked(step: Step, commit: str) -> str:
    taken = {str(path): sha256(path) for path in step.takes()}
    told = json.dumps([commit, step.options, taken], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _is_done(before: Done, asked: str) -> bool:
    """Whether it was asked for in the same way, and what it made is there as it was."""
    return before.asked == asked and all(
        Path(name).is_file() and sha256(Path(name)) == told for name, told in before.made.items()
    )


def gates(root: Path) -> tuple[Path, ...]:
    """Run what a change must pass.

    Raises:
        ReleaseError: something failed.
    """
    status = subprocess.run([str(root / ".ci/run"), "--every-turn"], cwd=root, check=False).returncode
    if status != 0:
        raise ReleaseError(f".ci/run ended with {status}; mend what failed above, and commit it.")
    return ()

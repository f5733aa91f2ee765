"""Which wheels to build: each target with each Python."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from scripts.base import console
from scripts.base.errors import UsageError
from scripts.source import kernel_set, matrix, matrix_checks
from scripts.wheels import toolchain


@dataclass(frozen=True)
class Job:
    """One wheel to build."""

    target: matrix.Target
    python: str
    kernels: tuple[kernel_set.Kernel, ...]
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """Which wheels to build.

    Nothing said: the default target, for the running Python, with what the target lists.
    """

    target: str | None = None  # its name, or a glob
    every_target: bool = False
    pythons: tuple[str, ...] = ()  # or "all" alone: those of the target
    kernels: tuple[kernel_set.Kernel, ...] = ()
    architectures: tuple[str, ...] = ()


def chosen(loaded: matrix.Matrix, choice: Choice) -> list[Job]:
    """The wheels of a choice: each target with each Python.

    Raises:
        UsageError: there is no such target, or none has what was asked for.
    """
    if choice.every_target:
        targets = loaded.targets
    elif choice.target is None:
        targets = (loaded.default(),)
    else:
        targets = tuple(t for t in loaded.targets if fnmatch.fnmatchcase(t.name, choice.target)) or (
            loaded.named(choice.target),
        )
    jobs = []
    for target in targets:
        versions = target.pythons if choice.pythons == ("all",) else choice.pythons or (None,)
        for version in versions:
            try:
                python = toolchain.check_python(target, version)
            except UsageError as e:
                if len(targets) == 1:
                    raise
                console.warn(f"left out: {e}")
                continue
            if mistake := matrix_checks.too_early(target.cuda, choice.architectures):
                raise UsageError(f"--arch: {mistake}; target {target.name} is for CUDA {target.cuda}.")
            jobs.append(
                Job(
                    target,
                    python,
                    choice.kernels or target.kernels,
                    choice.architectures or target.architectures,
                )
            )
    if not jobs:
        raise UsageError("no target has the Python that was asked for.")
    return jobs

"""Which wheels to build: those of targets."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from scripts.base.errors import UsageError
from scripts.source import kernel_set, matrix, matrix_checks


@dataclass(frozen=True)
class Job:
    """One wheel to build."""

    target: matrix.Target
    kernels: tuple[kernel_set.Kernel, ...]
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """Which wheels to build.

    Nothing said: the default target, with what it lists.
    """

    target: str | None = None  # its name, or a glob
    every_target: bool = False
    kernels: tuple[kernel_set.Kernel, ...] = ()
    architectures: tuple[str, ...] = ()


def chosen(loaded: matrix.Matrix, choice: Choice) -> list[Job]:
    """The wheels of a choice.

    Raises:
        UsageError: there is no such target, or its CUDA has not what was asked for.
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
        if mistake := matrix_checks.too_early(target.cuda, choice.architectures):
            raise UsageError(f"--arch: {mistake}; target {target.name} is for CUDA {target.cuda}.")
        kernels = choice.kernels or target.kernels
        jobs.append(Job(target, kernels, choice.architectures or target.architectures))
    return jobs

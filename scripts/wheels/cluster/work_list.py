"""The files that a scheduler's workers are to compile, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.wheels.cluster import compile_history, tasks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from scripts.source.kernel_set import Kernel
    from scripts.source.matrix import Target
    from scripts.wheels.compiling.kernels import Plan, Unit


@dataclass(frozen=True)
class Share:
    """The files of one plan."""

    plan: Plan
    units: tuple[Unit, ...]
    target: Target

    def order(self, run: str, find: tasks.Finder) -> tasks.Order:
        """What workers are told of it."""
        plan, tools = self.plan, self.plan.toolchain
        return tasks.Order(
            run=run,
            target=self.target,
            sample=plan.kernels[0],
            architectures=plan.architectures,
            shared_ptx=dict(plan.shared_ptx),
            kernel_sources=plan.tree.kernel_sources,
            key=self.units[0].key,
            nvcc=tools.toolkit.version,
            cxx=tools.cxx_version,
            cache=tools.sccache is not None,
            find=find,
        )


@dataclass(frozen=True)
class File:
    """One file that is to be compiled."""

    order: tasks.Order
    kernel: Kernel
    unit: Unit  # with what it was seen to take

    @property
    def known_as(self) -> str:
        """What it is noted as."""
        return compile_history.name_of(self.unit, self.order.target.cuda, self.order.architectures)


def files_of(shares: Sequence[Share], run: str, find: tasks.Finder) -> list[File]:
    """What is not there yet, the longest first; a file that several plans have is there once."""
    taken = compile_history.read()
    found: dict[Path, File] = {}
    for share in shares:
        order = share.order(run, find)
        kernels = {kernel.name: kernel for kernel in share.plan.kernels}
        for unit in share.units:
            if not unit.target.exists():
                name = compile_history.name_of(unit, share.target.cuda, share.plan.architectures)
                expected = compile_history.expected(unit, taken.files.get(name))
                found.setdefault(unit.target, File(order, kernels[unit.target.stem], expected))
    return sorted(found.values(), key=lambda file: (-file.unit.seconds, file.unit.source))

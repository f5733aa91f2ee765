"""Whether machine code may be made from the PTX of an earlier compute capability.

Kernels are compiled both ways and compared.

nvcc's front half, three quarters of its time, runs once for each kind of PTX. For kernels that ask for
nothing newer, the later halves may come to the same machine code from the same PTX. ``[shared-ptx]`` in
wheel_matrix.toml says for which they do; this is the check.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scripts.base import console, layout
from scripts.base.errors import CompileError
from scripts.lab.objects import machine_code
from scripts.wheels.compiling import flags, kernels, ninja

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from scripts.series.tree import Tree
    from scripts.source.kernel_set import Kernel
    from scripts.wheels.toolchain import compilers


@dataclass(frozen=True)
class Comparison:
    """One kernel file's machine code for one compute capability, from another's PTX and from its own."""

    file: str
    base: str
    architecture: str
    kernels: int
    differing: tuple[str, ...]


def compare(
    file: str, base: str, shared: Mapping[str, Mapping[str, bytes]], own: Mapping[str, Mapping[str, bytes]]
) -> list[Comparison]:
    """Compare :func:`machine_code` of a file's two objects, but for ``base``, where they have no choice.

    Raises:
        CompileError: they do not have the same kernels, so that there is nothing to compare.
    """
    comparisons = []
    for architecture in sorted(own, key=int):
        if architecture == base:
            continue
        ours, theirs = own[architecture], shared.get(architecture, {})
        if not ours or set(ours) != set(theirs):
            raise CompileError(
                f"{file}, sm_{architecture}: {len(ours)} kernels from its own PTX, {len(theirs)} from that "
                f"of compute_{base}."
            )
        comparisons.append(
            Comparison(
                file,
                base,
                architecture,
                len(ours),
                tuple(sorted(name for name in ours if ours[name] != theirs[name])),
            )
        )
    return comparisons


def check(
    applied: Tree,
    tools: compilers.Toolchain,
    chosen: Sequence[Kernel],
    shared_ptx: Mapping[str, tuple[str, ...]],
) -> list[Comparison]:
    """Compile kernel files both ways and compare."""
    comparisons = []
    for base, others in shared_ptx.items():
        both = (base, *others)
        work = []
        for way in (shared_ptx, {}):
            flavour = replace(kernels.FORK, code=tuple(flags.gencode(both, way)))
            # The compile cache may not be able to keep the first of the two.
            plan = kernels.Plan(
                applied, replace(tools, sccache=None), tuple(chosen), both, layout.BUILD, flavour, way
            )
            console.step(
                f"{len(chosen)} kernel files, PTX for "
                f"{', '.join('compute_' + a for a in flags.front_halves(both, way))}"
            )
            work.append((plan, kernels.kernel_units(plan)))
        ninja.compile_together(work, None)
        objects = [{unit.target.stem: unit.target for unit in units} for _, units in work]
        for kernel in chosen:
            shared, own = (machine_code(paths[kernel.name]) for paths in objects)
            comparisons += compare(kernel.source, base, shared, own)
    return comparisons

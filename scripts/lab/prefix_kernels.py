"""Whether a tree of a part of the series compiles: a kernel file of each pass, with the build's own flags."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from scripts.base import console, layout
from scripts.base.errors import CompileError, SeriesError
from scripts.base.git import Repository
from scripts.lab.compare import includes_torch
from scripts.series import tree
from scripts.series.prefixes import Check
from scripts.source import matrix
from scripts.wheels.compiling import kernels, ninja
from scripts.wheels.toolchain import compilers

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.series.model import Series
    from scripts.source.kernel_set import Kernel

KERNELS = "hdim32,fp16,causal"  # a file of each pass: the quickest to compile
_ARCHITECTURE = "90"


def check(series: Series, base: str, chosen: tuple[Kernel, ...], jobs: int | None = None) -> Check:
    """Compile kernel files of a prefix; nothing is linked.

    Objects and the compile cache are those of builds, so what was compiled is not compiled again.

    Args:
        series: of which the trees have a part.
        base: the commit that it stands on.
        chosen: the kernel files.
        jobs: compilers at once.
    """
    count = {patch.name: place for place, patch in enumerate(series.patches, 1)}

    def compiles(folder: Path, name: str) -> int:
        head = Repository(folder, SeriesError).resolve("HEAD")
        digest = series.upto(count.get(name, 0)).digest(base)
        torch = includes_torch(folder)
        tools = compilers.assemble(
            matrix.load(layout.MATRIX).default(),
            compilers.running_python() if torch else None,
            layout.BUILD,
            cache=True,
        )
        flavour = replace(kernels.FORK, torch_in_kernels=torch)
        applied = tree.finished(folder, base, head, digest)
        plan = kernels.Plan(applied, tools, chosen, (_ARCHITECTURE,), layout.BUILD, flavour)
        try:
            ninja.compile_units(plan, kernels.kernel_units(plan), jobs)
        except CompileError as e:
            console.error(str(e))
            return 1
        return 0

    return Check(f"compile {', '.join(kernel.name for kernel in chosen)}", compiles)

"""Run the kernels where there is no GPU, behind the C++ API, whose test program (``tests/cpp``) calls them.

``emulator`` says what that shows, and what it does not.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from typing import TYPE_CHECKING

from scripts.base import console, layout
from scripts.base.errors import CompileError, VerifyError
from scripts.base.process import run
from scripts.lab import emulator
from scripts.series import clone
from scripts.wheels.compiling import kernels, ninja
from scripts.wheels.proof import cpp_tests
from scripts.wheels.toolchain import compilers
from scripts.wheels.trust import binaries

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from scripts.lab.emulator import Emulation
    from scripts.series.tree import Tree
    from scripts.source.kernel_set import Kernel
    from scripts.source.matrix import Matrix


def library_objects(
    tools: compilers.Toolchain, applied: Tree, chosen: tuple[Kernel, ...], arch: str, jobs: int | None
) -> tuple[Path, ...]:
    """What the C++ API's library is linked of, but for a CUDA runtime; kernels are PTX.

    Raises:
        CompileError: a compiler failed.
    """
    plan = kernels.Plan(applied, tools, chosen, (arch,), layout.BUILD, emulator.FLAVOUR)
    console.step(f"Kernel files: {len(plan.kernels)}, as PTX; the core and the C++ API")
    units = [unit for unit in kernels.binding_units(plan) if unit.source != kernels.BINDING]
    return ninja.compile_units(plan, [*units, *kernels.kernel_units(plan)], jobs).objects


def library(tools: compilers.Toolchain, objects: Sequence[Path]) -> Path:
    """Link the C++ API's library with an emulated CUDA runtime in it, which programs call too.

    Raises:
        CompileError: a compiler failed.
    """
    folder = layout.BUILD / "emulator"
    linked = [*objects, *emulator.interpreter(tools, folder, torch=False)]
    name = hashlib.sha256(repr([str(path) for path in linked]).encode()).hexdigest()[:16]
    target = folder / f"cpp-{name}" / binaries.LIBRARY
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        run(
            [tools.cxx, "-shared", "-Wl,-Bsymbolic", f"-Wl,-soname,{binaries.LIBRARY}", "-o", part, *linked],
            error=CompileError,
            what="could not link the emulated library",
        )
        part.replace(target)
    return target


def cuda_headers(tools: compilers.Toolchain) -> list[Path]:
    """The folders in which a program finds CUDA's headers."""
    folders = [
        path for folder in tools.toolkit.include for path in (folder, folder / "cccl")
    ]  # cuda_fp16.h includes nv/target
    return [path for path in folders if path.is_dir()]


def emulate(loaded: Matrix, options: Emulation) -> None:
    """Compile the kernels for the emulator, and run the C++ API's test program against them.

    Raises:
        VerifyError: a test failed.
    """
    target = loaded.default()
    _, applied = clone.apply(loaded, options.source)
    console.step(f"Toolchain for {target.name}")
    tools = compilers.assemble(target, None, layout.BUILD, cache=True)
    objects = library_objects(tools, applied, options.kernels, options.architecture, options.jobs)
    built = library(tools, objects)
    console.step("The test program, and GoogleTest")
    headers = [applied.root / kernels.API, *cuda_headers(tools)]
    program = cpp_tests.build(
        layout.BUILD / "emulator/cpp-tests",
        {
            "FLASH_ATTENTION_V2_LIBRARY": str(built),
            "FLASH_ATTENTION_V2_INCLUDE": ";".join(map(str, headers)),
        },
    )
    console.step("Emulating")
    env = {**os.environ, "FLASH_ATTENTION_V2_EMULATED": "1", "FORK_EMULATED_GPU": options.architecture}
    status = subprocess.run([program], env=env, check=False).returncode
    if status:
        raise VerifyError(
            f"the C++ API's test program failed under emulation, with status {status}; its output is above."
        )
    console.done("Nothing failed under emulation. That is no proof of a library: its tests on a GPU are.")

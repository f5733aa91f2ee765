"""Run the kernels where there is no GPU, behind the real binding and Python package.

nvcc's PTX of them is interpreted (``tests/emulator``).

The same kernels run behind the C++ API, for its own test program (``tests/cpp``).

It shows wrong results, bits that depend on what they must not, reads and writes outside allocations,
misaligned addresses and races in shared memory. It proves nothing of a wheel: ptxas, machine code, timing and
the GPU's own rounding are not in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console, layout, pip
from scripts.base.errors import CompileError, ToolchainError, VerifyError
from scripts.base.process import run
from scripts.series import clone
from scripts.source import upstream
from scripts.wheels import (
    binaries,
    compiling,
    cpp_tests,
    kernels,
    linking,
    toolchain,
    torch_environment,
    tvm_ffi,
    verify,
)

if TYPE_CHECKING:
    from scripts.series.tree import Tree
    from scripts.source.kernel_set import Kernel
    from scripts.source.matrix import Matrix

SUITE = layout.ROOT / "tests/emulator"
KERNELS = "hdim32,fp16"
FLAVOUR = replace(
    kernels.FORK,
    defines=("-DFORK_EMULATED",),
    code=("-gencode=arch=compute_80,code=compute_80", "--compress-mode=none"),
)
_SOURCES = ("decode", "machine", "runtime")
_FOR_TORCH = "allocator"
_PACKAGES = (
    *("pytest>=8.4", "pytest-xdist>=3.6", "hypothesis>=6.130", "einops"),
    f"apache-tvm-ffi=={tvm_ffi.VERSION}",
)
_DEPENDENCIES = (
    "execnet",
    "iniconfig",
    "packaging",
    "pluggy",
    "pygments",
    "sortedcontainers",
    "typing-extensions",
)  # what those need, without torch
_TESTS_BYTES = 1.5e9  # of a process that runs tests
# Fused multiply-adds where the interpreter has them and nowhere else.
_CXX = ("-std=c++20", "-O2", "-march=native", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Emulation:
    """What is tried, and how."""

    kernels: tuple[Kernel, ...]
    architecture: str  # of the GPU
    python: str | None  # None: the one running
    source: upstream.Source
    jobs: int | None  # compilers, then processes of tests, at once
    pytest: tuple[str, ...] = ()  # more arguments for it


def interpreter(tools: toolchain.Toolchain, folder: Path, *, torch: bool = True) -> list[Path]:
    """The interpreter, compiled; in a folder that follows from its sources.

    Args:
        tools: its C++ compiler, and CUDA's headers.
        folder: of all such folders.
        torch: with torch's tensors in the memory that kernels may touch.
    """
    sources = [SUITE / f"{name}.cpp" for name in (*_SOURCES, *([_FOR_TORCH] if torch else []))]
    of = tools.environment.torch if torch else None
    parts = [path.read_bytes() for path in (*sources, *sorted(SUITE.glob("*.h")))] + [
        repr((of, tools.cxx_version, _CXX)).encode()
    ]
    place = folder / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    with_torch = [tools.environment.site / "torch/include"] if torch else []
    includes = [word for path in (*tools.toolkit.include, *with_torch) for word in ("-isystem", str(path))]

    def compiled(source: Path) -> Path:
        target = place / f"{source.stem}.o"
        if not target.exists():
            part = target.with_suffix(".part")
            run(
                [tools.cxx, *_CXX, *includes, "-c", source, "-o", part],
                error=CompileError,
                what=f"could not compile {source.name}",
            )
            part.replace(target)
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled, sources))


def _tools_for_tests(env: torch_environment.Environment, folder: Path) -> Path:
    """Pytest and the like for the environment's Python, beside it: the environment is the wheels' own."""
    requirements = [*_PACKAGES, *_DEPENDENCIES]
    place = folder / f"site-{env.tag}-{hashlib.sha256(repr(requirements).encode()).hexdigest()[:8]}"
    if not place.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            target = f"{temporary}/site"
            command = pip.installing(env.python, "--no-deps", "--target", target, *requirements)
            run(command, error=ToolchainError, what="could not install pytest and hypothesis", hint=pip.HINT)
            shutil.move(target, place)
    return place


def package(
    tools: toolchain.Toolchain, applied: Tree, chosen: tuple[Kernel, ...], arch: str, jobs: int | None
) -> list[Path]:
    """Build an extension that runs kernels on the CPU, and the Python package around it.

    The kernels are those that a GPU of that compute capability chooses.

    Returns:
        Folders for the path of the toolchain's Python.

    Raises:
        CompileError: a compiler failed.
    """
    env = tools.environment
    plan = kernels.Plan(applied, tools, chosen, (arch,), layout.BUILD, FLAVOUR)
    console.step(f"Kernel files: {len(plan.kernels)}, as PTX; and the binding")
    compiled = compiling.compile_units(
        plan, [*kernels.binding_units(plan), *kernels.kernel_units(plan)], jobs
    )
    folder = layout.BUILD / "emulator"
    objects = [*compiled.objects, *interpreter(tools, folder)]
    name = hashlib.sha256(repr([str(path) for path in objects] + [applied.commit]).encode()).hexdigest()[:16]
    site = folder / f"package-{name}"
    if not site.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            unfinished = Path(temporary) / "package"
            for name in ("flash_attn", FLAVOUR.extension):
                shutil.copytree(applied.root / name, unfinished / name)
            applied.check_unchanged()
            libraries = [f"-L{env.site}/torch/lib", "-ltorch_cpu", "-lc10", *linking.ffi_options(tools)]
            # Bound within: torch may bring the real CUDA runtime along.
            output = unfinished / FLAVOUR.extension / binaries.EXTENSION
            run(
                [tools.cxx, "-shared", "-Wl,-Bsymbolic", "-o", output, *objects, *libraries],
                error=CompileError,
                what="could not link the emulator",
            )
            unfinished.rename(site)
    return [site, _tools_for_tests(env, folder)]


def library(
    tools: toolchain.Toolchain, applied: Tree, chosen: tuple[Kernel, ...], arch: str, jobs: int | None
) -> Path:
    """Build the C++ API's library with kernels that run on the CPU, and an emulated CUDA runtime in it.

    Raises:
        CompileError: a compiler failed.
    """
    plan = kernels.Plan(applied, tools, chosen, (arch,), layout.BUILD, FLAVOUR)
    console.step(f"Kernel files: {len(plan.kernels)}, as PTX; the core and the C++ API")
    units = [unit for unit in kernels.binding_units(plan) if unit.source != kernels.BINDING]
    compiled = compiling.compile_units(plan, [*units, *kernels.kernel_units(plan)], jobs)
    folder = layout.BUILD / "emulator"
    objects = [*compiled.objects, *interpreter(tools, folder, torch=False)]
    name = hashlib.sha256(repr([str(path) for path in objects]).encode()).hexdigest()[:16]
    target = folder / f"cpp-{name}" / binaries.LIBRARY
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        run(
            [tools.cxx, "-shared", "-Wl,-Bsymbolic", f"-Wl,-soname,{binaries.LIBRARY}", "-o", part, *objects],
            error=CompileError,
            what="could not link the emulated library",
        )
        part.replace(target)
    return target


def emulate_cpp(loaded: Matrix, options: Emulation) -> None:
    """Compile the kernels for the emulator, and run the C++ API's test program against them.

    Raises:
        VerifyError: a test failed.
    """
    target = loaded.default()
    _, applied = clone.apply(loaded, options.source)
    console.step(f"Toolchain for {target.name}")
    tools = toolchain.assemble(target, None, layout.BUILD, cache=True)
    built = library(tools, applied, options.kernels, options.architecture, options.jobs)
    console.step("The test program, and GoogleTest")
    headers = [applied.root / kernels.API]
    for folder in tools.toolkit.include:
        headers += [folder, folder / "cccl"]  # where cuda_fp16.h finds nv/target
    program = cpp_tests.build(
        layout.BUILD / "emulator/cpp-tests",
        {
            "FLASH_ATTENTION_V2_LIBRARY": str(built),
            "FLASH_ATTENTION_V2_INCLUDE": ";".join(str(path) for path in headers if path.is_dir()),
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


def emulate(loaded: Matrix, options: Emulation) -> None:
    """Compile the kernels for the emulator, and run the suite against them.

    Raises:
        VerifyError: a case failed.
    """
    target = loaded.default()
    python = options.python or toolchain.running_python()
    _, applied = clone.apply(loaded, options.source)
    own = layout.BUILD / "emulator" / verify.UPSTREAM_TESTS.name
    own.parent.mkdir(parents=True, exist_ok=True)
    verify.write_upstream_tests(
        upstream.find(loaded.upstream, layout.UPSTREAM, layout.cache("sdist"), options.source), own
    )
    console.step(f"Toolchain for {target.name}, Python {python}")
    tools = toolchain.assemble(target, python, layout.BUILD, cache=True)
    folders = package(tools, applied, options.kernels, options.architecture, options.jobs)
    path = os.pathsep.join(map(str, [*folders, layout.ROOT / "tests/wheel"]))
    # What torch computes is small: with a thread a core in each process, threads would spend their time
    # waiting for each other.
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "FORK_UPSTREAM_TESTS": str(own),
        "FORK_EMULATED_GPU": options.architecture,
        "OMP_NUM_THREADS": "1",
    }
    command = [
        str(tools.environment.python),
        "-m",
        "pytest",
        str(SUITE),
        "-c",
        os.devnull,
        f"--rootdir={SUITE}",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    processes, _ = compiling.job_limit(options.jobs, _TESTS_BYTES)
    if processes > 1:
        command += ["-n", str(processes), "--dist", "worksteal"]
    console.step(f"Emulating in {processes} processes" if processes > 1 else "Emulating")
    status = subprocess.run([*command, *options.pytest], env=env, check=False).returncode
    if status:
        raise VerifyError(
            f"the suite failed under emulation: pytest exited with {status}; its output is above."
        )
    console.done("Nothing failed under emulation. That is no proof of a wheel: nox -s verify, on a GPU.")

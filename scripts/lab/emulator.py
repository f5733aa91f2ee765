"""Run the kernels where there is no GPU, behind the real binding and Python package.

nvcc's PTX of them is interpreted (``tests/emulator``).

``emulated_library`` runs the same kernels behind the C++ API.

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

from scripts.base import console, layout
from scripts.base.errors import CompileError, VerifyError
from scripts.base.process import run
from scripts.lab import serving_clients
from scripts.series import clone
from scripts.source import upstream
from scripts.wheels.compiling import kernels, ninja
from scripts.wheels.packing import linking
from scripts.wheels.proof import verify
from scripts.wheels.toolchain import compilers, tvm_ffi
from scripts.wheels.trust import binaries

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    client: str | None = None  # an engine whose classes call the kernels; None: the suite that needs none


def interpreter(tools: compilers.Toolchain, folder: Path, *, torch: bool = True) -> list[Path]:
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


def package(
    tools: compilers.Toolchain, applied: Tree, chosen: tuple[Kernel, ...], arch: str, jobs: int | None
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
    compiled = ninja.compile_units(plan, [*kernels.binding_units(plan), *kernels.kernel_units(plan)], jobs)
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
    return [site, serving_clients.site(env, folder, "site", [*_PACKAGES, *_DEPENDENCIES])]


def _environment(
    tools: compilers.Toolchain, root: Path, folders: Sequence[Path], options: Emulation
) -> dict[str, str]:
    """For the suite's processes: where Python finds what they import, and what the emulator emulates."""
    python, libraries = [*folders, layout.ROOT / "tests/wheel"], []
    if options.client is not None:
        own = layout.BUILD / "emulator"
        packages, driver = serving_clients.beside(options.client, tools, own)
        python += [packages, serving_clients.announced(root, own)]
        libraries.append(str(driver))
    libraries += [path for path in [os.environ.get("LD_LIBRARY_PATH", "")] if path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, python)),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "FORK_EMULATED_GPU": options.architecture,
        # What torch computes is small: with a thread a core in each process, threads would spend their time
        # waiting for each other.
        "OMP_NUM_THREADS": "1",
    }


def _upstream_tests(loaded: Matrix, options: Emulation) -> Path:
    """Upstream's own test file, for the cases that run it."""
    own = layout.BUILD / "emulator" / verify.UPSTREAM_TESTS.name
    own.parent.mkdir(parents=True, exist_ok=True)
    verify.write_upstream_tests(
        upstream.find(loaded.upstream, layout.UPSTREAM, layout.cache("sdist"), options.source), own
    )
    return own


def emulate(loaded: Matrix, options: Emulation) -> None:
    """Compile the kernels for the emulator, and run the suite against them.

    Raises:
        VerifyError: a case failed.
    """
    target = loaded.default()
    python = options.python or compilers.running_python()
    _, applied = clone.apply(loaded, options.source)
    tests = serving_clients.tests_of(options.client)
    console.step(f"Toolchain for {target.name}, Python {python}")
    tools = compilers.assemble(target, python, layout.BUILD, cache=True)
    folders = package(tools, applied, options.kernels, options.architecture, options.jobs)
    env = {
        **_environment(tools, applied.root, folders, options),
        "FORK_UPSTREAM_TESTS": str(_upstream_tests(loaded, options)),
    }
    command = [str(tools.environment.python), "-m", "pytest", *tests]
    command += ["-c", os.devnull, f"--rootdir={SUITE}", "-q", "-p", "no:cacheprovider"]
    processes, _ = ninja.job_limit(options.jobs, _TESTS_BYTES)
    if processes > 1:
        command += ["-n", str(processes), "--dist", "worksteal"]
    console.step(f"Emulating in {processes} processes" if processes > 1 else "Emulating")
    status = subprocess.run([*command, *options.pytest], env=env, check=False).returncode
    if status:
        raise VerifyError(
            f"the suite failed under emulation: pytest exited with {status}; its output is above."
        )
    console.done("Nothing failed under emulation. That is no proof of a wheel: nox -s verify, on a GPU.")

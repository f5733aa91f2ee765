"""What is compiled, kernel files and the binding apart: units, flags, and the keys of their folders.

A build folder is named by the digest of everything that its objects depend on, so a finished object is
never stale and an interrupted build goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from packaging.version import Version

from scripts.base.errors import ToolchainError
from scripts.base.process import quoted
from scripts.source.kernel_set import Kernel, Pass
from scripts.wheels.compiling.flags import (
    COMPRESS,
    COMPRESS_FROM,
    CORE_FLAGS,
    CXX_FLAGS,
    NVCC_FLAGS,
    for_gpus,
    front_halves,
    gencode,
    masks,
    without_bias,
)
from scripts.wheels.toolchain import tvm_ffi

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from scripts.series.tree import Snapshot, Tree
    from scripts.wheels.toolchain.compilers import Toolchain

_CXX20_FROM = Version("2.14")  # the torch whose headers ask for it; upstream builds with 17
# nvcc puts a hash of the source's real path, one of the working directory and its process id into the names
# of what is static in a kernel file. The first is the last path given; the seed takes the others' place.
# (12.4 has neither them nor a seed.)
_NAMED = "-Xcudafe=--orig_src_path_name -Xcudafe=$source"
_SEEDED = " --frandom-seed=$source"
CORE = "csrc/flash_attn/core"  # what is compiled once for each choice of kernels
API = "csrc/flash_attn/api"  # and so is the C++ API around it
BINDING = f"{CORE}/binding.cpp"  # which Python calls the core through
INCLUDES = ("csrc/flash_attn", "csrc/flash_attn/src", CORE, "csrc/cutlass/include")

# Seconds and bytes that a file of head dim 64 or 128 took on one core with nvcc 13.0 for one architecture.
# They order the files, limit the jobs and weigh the progress bar; what is built does not depend on them.
_SECONDS = {
    (Pass.FWD, False): 83,
    (Pass.FWD, True): 73,
    (Pass.SPLIT, False): 125,
    (Pass.SPLIT, True): 115,
    (Pass.BWD, False): 103,
    (Pass.BWD, True): 96,
}
_FRONT_HALF = 0.75  # of them, up to PTX
_BYTES = {Pass.FWD: 4.0e9, Pass.SPLIT: 4.0e9, Pass.BWD: 6.5e9}


@dataclass(frozen=True)
class Flavour:
    """The extension's name, and what tells its code from another's in the same process."""

    extension: str
    defines: tuple[str, ...] = ()
    torch_in_kernels: bool = False  # upstream's own kernel files include torch, ours do not
    code: tuple[
        str, ...
    ] = ()  # flags for what kernels become, in the place of machine code for the plan's architectures


FORK = Flavour("flash_attn_2_cuda")
# Unpatched kernels to measure against, beside ours: its own module name and C++ namespace.
STOCK = Flavour("flash_stock_cuda", ("-DFLASH_NAMESPACE=flash_stock",), torch_in_kernels=True)


@dataclass(frozen=True)
class Compilation:
    """How source files are compiled, whatever they become a part of."""

    tree: Snapshot
    toolchain: Toolchain
    kernels: tuple[Kernel, ...]
    architectures: tuple[str, ...]
    build: Path
    flavour: Flavour = FORK
    shared_ptx: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan(Compilation):
    """What is compiled: a source tree into an extension."""

    tree: Tree


@dataclass(frozen=True)
class Unit:
    """One source file and the object it becomes."""

    source: str  # relative to the tree
    target: Path
    rule: str  # nvcc, core or cxx
    seconds: float
    memory: float
    key: str = ""  # the digest of all that the object depends on, where its place has one


def seconds_expected(
    kernel: Kernel, architectures: Sequence[str], shared_ptx: Mapping[str, tuple[str, ...]]
) -> float:
    """A guess at the CPU seconds of one kernel file."""
    front = len(front_halves(architectures, shared_ptx))
    known = _SECONDS.get((kernel.kind, kernel.causal), max(_SECONDS.values()))  # of a pass not measured yet
    return known * (_FRONT_HALF * front + (1 - _FRONT_HALF) * len(architectures))


def nvcc_flags(plan: Compilation) -> list[str]:
    """The flags that decide what a kernel file becomes; they go into a wheel's provenance."""
    flags = [*NVCC_FLAGS, *without_bias(plan.kernels)]
    if not plan.flavour.torch_in_kernels:
        flags.append(for_gpus(plan.architectures))
    if plan.flavour.code:
        return [*flags, *plan.flavour.code]
    compress = COMPRESS if Version(plan.toolchain.toolkit.release) >= COMPRESS_FROM else ()
    return [*flags, *compress, *gencode(plan.architectures, plan.shared_ptx)]


def digest(*parts: object) -> str:
    """What tells one choice of inputs from another, as the name of a folder."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def _site(plan: Compilation) -> str:
    """Where torch lies, as seen from the source tree."""
    return os.path.relpath(plan.toolchain.environment.site.resolve(), plan.tree.root.resolve())


def extension_key(objects: Sequence[Path], options: Sequence[str]) -> str:
    """What tells one extension from another: the linker's options, and objects.

    The folders of objects follow from their content.
    """
    return digest([f"{path.parent.name}/{path.name}" for path in objects], options)


def _includes(plan: Compilation, *, torch: bool) -> list[str]:
    toolchain = plan.toolchain
    folders: list[str | Path] = [*toolchain.toolkit.include]
    words = [f"-I{folder}" for folder in INCLUDES]
    if torch:
        site, env = _site(plan), toolchain.environment
        folders = [
            f"{site}/torch/include",
            f"{site}/torch/include/torch/csrc/api/include",
            env.include,
            *folders,
            *(f"{site}/{folder.relative_to(env.site)}/include" for folder in env.cuda),
        ]
        words += [_abi(toolchain)]
    return [
        *words,
        *(word for folder in folders for word in ("-isystem", str(folder))),
    ]  # apart: nvcc does not take them joined


def _abi(toolchain: Toolchain) -> str:
    return f"-D_GLIBCXX_USE_CXX11_ABI={int(toolchain.environment.cxx11_abi)}"


def _named(tools: Toolchain) -> str:
    return _NAMED + (_SEEDED if tools.toolkit.takes_seed else "")


def kernel_units(plan: Plan) -> list[Unit]:
    """Kernel files, longest first, in the folder of their digest.

    The digest is of sources, compiler, flags and architectures; of no Python, and of torch in stock's alone.
    """
    tools = plan.toolchain
    torch = (tools.environment.torch, _abi(tools)) if plan.flavour.torch_in_kernels else None
    compilers = (tools.toolkit.version, tools.cxx_version)
    key = digest(
        plan.tree.kernel_sources, *compilers, torch, nvcc_flags(plan), _named(tools), plan.flavour.defines
    )
    folder = plan.build / "kernels" / key
    units = [
        Unit(
            f"csrc/flash_attn/src/{k.source}",
            folder / f"{k.name}.o",
            "nvcc",
            seconds_expected(k, plan.architectures, plan.shared_ptx),
            _BYTES.get(k.kind, max(_BYTES.values())),
            key,
        )
        for k in plan.kernels
    ]
    return sorted(units, key=lambda unit: (-unit.seconds, unit.source))


def binding_units(plan: Plan) -> list[Unit]:
    """What is compiled beside kernel files: it alone depends on the choice of them.

    Ours is the core, with a binding that needs neither torch nor Python, and the C++ API; stock's is
    upstream's binding.
    """
    return [_stock_binding(plan)] if plan.flavour.torch_in_kernels else _core_units(plan)


def _core_units(plan: Plan) -> list[Unit]:
    tools = plan.toolchain
    key = digest(
        plan.tree.sources,
        *(tools.toolkit.version, tools.cxx_version, tvm_ffi.VERSION, CORE_FLAGS, nvcc_flags(plan)),
        *(_named(tools), plan.flavour.defines, masks(plan.kernels)),
    )
    found = [path for folder in (CORE, API) for path in sorted((plan.tree.root / folder).glob("*"))]
    return [
        Unit(
            path.relative_to(plan.tree.root).as_posix(),
            # In a folder of its own each: both have a small_kernels.cu.
            plan.build / path.parent.name / key / f"{path.stem}.o",
            "nvcc" if path.suffix == ".cu" else "core",
            8,
            1.0e9,
            key,
        )
        for path in found
        if path.suffix in (".cpp", ".cu")
    ]


def _stock_binding(plan: Plan) -> Unit:
    tools, env = plan.toolchain, plan.toolchain.environment
    compilers = (tools.toolkit.version, tools.cxx_version)
    key = digest(
        plan.tree.sources,
        *(env.torch, env.tag, _abi(tools), *compilers, *env.pybind),
        *(CXX_FLAGS, plan.flavour.extension, plan.flavour.defines, masks(plan.kernels)),
    )
    return Unit(
        "csrc/flash_attn/flash_api.cpp", plan.build / "binding" / key / "flash_api.o", "cxx", 40, 2.0e9, key
    )


def _nvcc(plan: Compilation) -> str:
    """The command for a kernel file, with ninja's variables for what differs."""
    tools = plan.toolchain
    words: list[str | Path] = [
        tools.toolkit.nvcc,
        *nvcc_flags(plan),
        f"-ccbin={tools.cxx}",
        "-Xcompiler=-fPIC",
        *plan.flavour.defines,
    ]
    words += _includes(plan, torch=plan.flavour.torch_in_kernels)
    return f"{quoted(words)} {_named(tools)} -c $staged"


def _core(plan: Compilation) -> str:
    """The command for the core, likewise."""
    tools = plan.toolchain
    if tools.ffi is None:
        raise ToolchainError(
            "the toolchain was assembled without apache-tvm-ffi; this is a fault of the build system."
        )
    words: list[str | Path] = [tools.cxx, *CORE_FLAGS, *masks(plan.kernels), *plan.flavour.defines]
    words += [*_includes(plan, torch=False), "-isystem", tools.ffi.include]
    # Errors name headers; where they lay is nobody's business.
    words.append(f"-ffile-prefix-map={tools.ffi.root}/=")
    return f"{quoted(words)} -c $source"


def _cxx(plan: Compilation) -> str:
    """The command for upstream's binding, likewise."""
    words: list[str | Path] = [
        plan.toolchain.cxx,
        *CXX_FLAGS,
        "-std=c++20" if Version(plan.toolchain.environment.torch) >= _CXX20_FROM else "-std=c++17",
        f"-DTORCH_EXTENSION_NAME={plan.flavour.extension}",
        *masks(plan.kernels),
        *plan.flavour.defines,
        *plan.toolchain.environment.pybind,
    ]
    # The messages of torch's checks name its headers, likewise.
    words += [*_includes(plan, torch=True), f"-ffile-prefix-map={_site(plan)}/="]
    return f"{quoted(words)} -c $source"


def command_of(plan: Compilation, rule: str) -> str:
    """What compiles a unit of this rule, with ninja's variables for what differs from unit to unit."""
    return {"nvcc": _nvcc, "cxx": _cxx, "core": _core}[rule](plan)

"""The flags and the environment of compilers, and the definitions that tell code what there will be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from packaging.version import Version

from scripts.source.kernel_set import Kernel, Pass
from scripts.source.matrix_tables import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# As upstream's setup.py has them, so that stock and patched kernels are compiled alike.
NVCC_FLAGS = (
    "-O3",
    "-std=c++17",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "--use_fast_math",
)


# Of CUDA's functions, those whose calls within the library the linker sends to the core's own, which take
# less time (core/launch.cpp). Two have private names: a build without needs none of them.
WRAPPED = (
    ()
    if os.environ.get("FORK_NO_WRAP") == "1"
    else (
        *("cudaDeviceGetAttribute", "cudaFuncSetAttribute", "cudaGetDevice"),
        *("__cudaGetKernel", "__cudaLaunchKernel"),
    )
)


CORE_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-DNDEBUG", "-fvisibility=hidden"),
    *(["-DFORK_WRAPPED"] if WRAPPED else []),
)


# Of upstream's binding.
CXX_FLAGS = ("-O3", "-fPIC", "-DNDEBUG", "-DTORCH_API_INCLUDE_EXTENSION_H")


# What machine code shrinks to a quarter with; an object of 13.0 asks for a driver that can unpack it anyway
# (R580).
COMPRESS = ("--compress-mode=size",)


COMPRESS_FROM = Version("13.0")


def masks(kernels: Sequence[Kernel]) -> list[str]:
    """Definitions that tell the binding which kernels there are (``fork_kernel_set.h``)."""
    return [
        f"-DFORK_KERNELS_{kind.name}=0x{sum(1 << k.bit for k in kernels if k.kind is kind):06x}"
        for kind in Pass
    ] + without_bias(kernels)


def without_bias(kernels: Sequence[Kernel]) -> list[str]:
    """The definition that tells there are no masks and biases, where no kernel takes them."""
    return [] if all(k.bias for k in kernels) else ["-DFORK_NO_BIAS"]


def for_gpus(architectures: Sequence[str]) -> str:
    """The definition that tells kernel files which machine code there will be (``fork_gpus.h``).

    There will be no PTX.
    """
    return f"-DFORK_ARCHITECTURES=0x{sum(1 << ARCHITECTURES.index(a) for a in architectures):03x}"


def front_halves(
    architectures: Sequence[str], shared_ptx: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """For which compute capabilities PTX is made, and machine code for which from it.

    >>> front_halves(("80", "90", "120"), {"80": ("86", "90")})
    {'80': ('80', '90'), '120': ('120',)}
    >>> front_halves(("90",), {"80": ("86", "90")})
    {'90': ('90',)}
    """
    made: dict[str, tuple[str, ...]] = {}
    for architecture in architectures:
        base = next((b for b, others in shared_ptx.items() if architecture in (b, *others)), architecture)
        group = tuple(a for a in architectures if a in (base, *shared_ptx.get(base, ())))
        made |= {base: group} if len(group) > 1 else {architecture: (architecture,)}
    return made


def gencode(architectures: Sequence[str], shared_ptx: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Options for machine code of these compute capabilities, and no PTX."""
    return [
        f"-gencode=arch=compute_{base},code="
        + (f"sm_{group[0]}" if len(group) == 1 else f"[{','.join(f'sm_{a}' for a in group)}]")
        for base, group in front_halves(architectures, shared_ptx).items()
    ]


# Options that nvcc (and its nvcc.profile), g++ and ld take from the environment: they would be in no digest,
# and in no wheel's provenance.
HIDDEN_OPTIONS = (
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "INCLUDES", "SYSTEM_INCLUDES", "LIBRARIES"),
    *("CUDAFE_FLAGS", "NVVM_FLAGS", "PTXAS_FLAGS", "OCG_FLAGS"),
    *(
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "GCC_EXEC_PREFIX",
        "COMPILER_PATH",
        "LIBRARY_PATH",
        "LD_RUN_PATH",
    ),
)


def environment() -> dict[str, str]:
    """The environment of compilers, and of the cache that starts them."""
    return {name: value for name, value in os.environ.items() if name not in HIDDEN_OPTIONS}

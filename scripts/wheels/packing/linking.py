"""Link kernels into the library that C++ and Python call, and the binding; or into upstream's extension."""

from __future__ import annotations

import json
import re
import tempfile
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import ToolchainError, WheelError
from scripts.base.process import run
from scripts.wheels.compiling.flags import HIDDEN_OPTIONS, WRAPPED
from scripts.wheels.compiling.kernels import FORK
from scripts.wheels.toolchain import tvm_ffi
from scripts.wheels.trust.binaries import EXTENSION, LIBRARY, LIBRARY_IN_WHEEL, needed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.wheels.toolchain.compilers import Toolchain

_TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python", "c10_cuda", "torch_cuda")

_STATIC_RUNTIME = "libcudart_static.a"


class Product(Enum):
    """What is linked."""

    STOCK = "upstream's extension"
    LIBRARY = "the library of a wheel"  # it needs the CUDA runtime by the name that torch loads
    ARCHIVED = "the library of the archive"  # it holds a CUDA runtime
    BINDING = "what Python loads"


_THROWER = '#include <stdexcept>\nvoid thrower() { throw std::runtime_error("thrown"); }\n'


def ffi_options(toolchain: Toolchain) -> list[str]:
    """What the linker is told of apache-tvm-ffi, which Python loads before us."""
    return [] if toolchain.ffi is None else [f"-L{toolchain.ffi.lib}", f"-l:{tvm_ffi.LIBRARY}"]


def link_options(toolchain: Toolchain, product: Product) -> list[str]:
    """What the linker is told beside objects and folders.

    All are stripped. The wheel's parts and stock's extension need the CUDA runtime by the name that torch
    loads, so that a process has one. Ours need nothing else (``-z defs``); stock's needs torch. Within the
    library, calls of some of CUDA's functions go to the core's ``__wrap_…`` (core/launch.cpp).
    """
    major = toolchain.toolkit.release.partition(".")[0]
    runtime = f"-l:libcudart.so.{major}"
    if product is Product.STOCK:
        return ["-shared", "-s", *(f"-l{name}" for name in _TORCH_LIBRARIES), runtime]
    own = ["-shared", "-s", "-Wl,-z,defs", "-Wl,--gc-sections"]
    if product is Product.BINDING:
        up = _way(f"{FORK.extension}/{EXTENSION}", str(PurePosixPath(LIBRARY_IN_WHEEL).parent))
        return [*own, f"-Wl,-soname,{EXTENSION}", *_searching(up, first=True), f"-l:{tvm_ffi.LIBRARY}"]
    # Its own calls stay within, whatever functions of these names a program has.
    within = ["-Wl,-Bsymbolic-functions", *(f"-Wl,--wrap={name}" for name in WRAPPED)]
    library = [*own, f"-Wl,-soname,{LIBRARY}", *within]
    if product is Product.LIBRARY:
        return [*library, *_searching(_way(LIBRARY_IN_WHEEL, f"{runtime_package(major)}/lib")), runtime]
    hidden = ["-Wl,--exclude-libs,ALL", "-Wl,--as-needed"]
    return [*library, *hidden, f"-l:{_STATIC_RUNTIME}", "-ldl", "-lrt", "-lpthread"]


def runtime_package(major: str) -> str:
    """Where the CUDA runtime that torch depends on lies beside a wheel, for programs that load no torch.

    >>> runtime_package("12"), runtime_package("13")
    ('nvidia/cuda_runtime', 'nvidia/cu13')
    """
    return "nvidia/cuda_runtime" if major == "12" else f"nvidia/cu{major}"


def _way(file: str, folder: str) -> str:
    """From a file's folder to another folder of a wheel.

    >>> _way("flash_attn_2_cuda/core.so", "flash_attn/cpp/lib")
    '../flash_attn/cpp/lib'
    """
    return "../" * (len(PurePosixPath(file).parts) - 1) + folder


def _searching(way: str, first: bool = False) -> list[str]:
    """Have the loader look there, seen from the library that asks; LD_LIBRARY_PATH comes first or second."""
    return [f"-Wl,-rpath,$ORIGIN/{way}", f"-Wl,--{'disable' if first else 'enable'}-new-dtags"]


def link(
    toolchain: Toolchain,
    objects: Sequence[Path],
    target: Path,
    log: Path,
    product: Product = Product.LIBRARY,
) -> None:
    """Link one product, stripped; one run at a time in a clone, and once.

    Args:
        toolchain: its C++ compiler links.
        objects: of which it is made; of the binding, the wheel's library too.
        target: the file.
        log: where the linker's words go.
        product: what it is.

    Raises:
        WheelError: the linker failed, or linked libstdc++ into the file.
    """
    with files.in_turn(log.with_suffix(".lock"), "links in this clone"):
        if not is_linked(target):
            _link(toolchain, objects, target, log, product)


def _archives(target: Path) -> Path:
    """Where the names of an extension's static libraries lie: beside it."""
    return target.with_name(target.name + ".static.json")


def is_linked(target: Path) -> bool:
    """Whether an extension is there, and with it what the linker said of static libraries."""
    return target.exists() and _archives(target).exists()


def static_libraries(target: Path) -> list[str]:
    """The archives whose code an extension holds, such as ``libgcc.a``, as the linker told."""
    return list(json.loads(_archives(target).read_text(encoding="utf-8")))


def _members_in(link_map: str) -> list[str]:
    r"""The archives of which a linker's map names a member; the map's own words are of the user's language.

    >>> _members_in(" .text 0x1 0x2 /usr/lib/libgcc.a(_muldi3.o)\\nLOAD /usr/lib/libc_nonshared.a")
    ['libgcc.a']
    """
    return sorted({Path(name).name for name in re.findall(r"(\S+\.a)\([^()\s]+\)", link_map)})


# The functions of the C++ API; those of a C interface are there by their common beginning.
_API = """
FLASH_ATTENTION_V2_1 {
    global:
        flash_attention_v2_*;
        extern "C++" {
            flash_attention_v2_set_layout*;
            flash_attention_v2_forward*;
            flash_attention_v2_backward*;
            is_config_valid*;
        };
    local: *;
};
"""
# What the binding calls: the table of the core's functions (core/bound.h).
_PRIVATE = """
FLASH_ATTENTION_V2_PRIVATE {
    global: flash_attn_core;
};
"""
# The symbols of ours that others may see.
_SHOWN = {
    Product.LIBRARY: _API + _PRIVATE,
    Product.ARCHIVED: _API,
    Product.BINDING: "{ global: __tvm_ffi_*; local: *; };\n",
}


def shown(product: Product) -> str:
    """The version script of a product; none for stock's extension, whose symbols are as upstream has them."""
    return _SHOWN.get(product, "")


def _runtimes(toolchain: Toolchain) -> list[Path]:
    """Where a toolkit has its libraries."""
    root = toolchain.toolkit.nvcc.parent.parent
    return [root / "lib64", root / "lib"]


def require_static_runtime(toolchain: Toolchain) -> None:
    """Refuse a toolkit that the archive's library cannot be linked with, before anything is compiled.

    Raises:
        ToolchainError: it lacks the CUDA runtime that the library is to hold.
    """
    if not any((folder / _STATIC_RUNTIME).is_file() for folder in _runtimes(toolchain)):
        raise ToolchainError(
            f"{toolchain.toolkit.nvcc.parent.parent} has no {_STATIC_RUNTIME}, the CUDA runtime that the "
            "archive's library holds. Install the whole CUDA toolkit and set CUDA_HOME, or build the wheel: "
            "its library does without."
        )


def require_shared_libstdcxx(toolchain: Toolchain) -> None:
    """Refuse a C++ compiler whose libraries would hold libstdc++, before anything is compiled.

    Raises:
        ToolchainError: it is one, or links nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "thrower.cpp", Path(folder) / "thrower.so"
        source.write_text(_THROWER, encoding="utf-8")
        run(
            [toolchain.cxx, "-fPIC", "-shared", source, "-o", library],
            error=ToolchainError,
            what=f"{toolchain.cxx} does not link a library",
            without=HIDDEN_OPTIONS,
        )
        if not _asks_for_libstdcxx(library):
            raise ToolchainError(_brings_libstdcxx(toolchain, "a library"))


def _asks_for_libstdcxx(library: Path) -> bool:
    return any(name.startswith("libstdc++.so") for name in needed(library))


def _brings_libstdcxx(toolchain: Toolchain, what: str) -> str:
    return (
        f"{toolchain.cxx} linked libstdc++ into {what}; the program brings another, and the "
        "first C++ error that crosses between the two crashes the process. Install the compiler's shared "
        "library (Debian: g++), or set CXX to a compiler that links libstdc++.so.6."
    )


def _folders(toolchain: Toolchain, product: Product) -> list[Path]:
    """Where the linker looks."""
    folders = _runtimes(toolchain)
    if product is Product.STOCK:
        env = toolchain.environment
        return [env.site / "torch/lib", *(folder / "lib" for folder in env.cuda), *folders]
    return [*folders, *([toolchain.ffi.lib] if toolchain.ffi is not None else [])]


def _link(toolchain: Toolchain, objects: Sequence[Path], target: Path, log: Path, product: Product) -> None:
    folders = _folders(toolchain, product)
    target.parent.mkdir(parents=True, exist_ok=True)
    part, script = target.with_name(target.name + ".part"), target.with_name(target.name + ".map")
    if shown(product):
        files.write(script, shown(product))
    command: list[str | Path] = [
        toolchain.cxx,
        "-o",
        part,
        *objects,
        *(f"-L{folder}" for folder in folders if folder.is_dir()),
        *link_options(toolchain, product),
        *([f"-Wl,--version-script={script}"] if shown(product) else []),
        f"-Wl,-Map={part}.map",
    ]
    run(
        command,
        error=WheelError,
        what=f"could not link {product.value}",
        hint="Objects of a damaged disk or another compiler? Delete build/kernels and build again.",
        log=log,
        without=HIDDEN_OPTIONS,
    )
    script.unlink(missing_ok=True)
    told = Path(f"{part}.map")
    link_map = told.read_text(encoding="utf-8", errors="replace")
    told.unlink()
    if not _asks_for_libstdcxx(part):
        part.unlink()
        raise WheelError(_brings_libstdcxx(toolchain, product.value))
    files.write(_archives(target), json.dumps(_members_in(link_map)))
    part.replace(target)

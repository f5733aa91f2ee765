"""Link kernels and binding into the extension; read which libraries one needs."""

from __future__ import annotations

import io
import json
import re
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from scripts.base import files
from scripts.base.errors import WheelError
from scripts.base.process import run
from scripts.wheels import tvm_ffi
from scripts.wheels.flags import HIDDEN_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.wheels.toolchain import Toolchain

# What torch and apache-tvm-ffi load before us, and what manylinux counts on.
_PRESENT = re.compile(
    r"libcudart\.so\.\d+|libtvm_ffi\.so|lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so\.\d+|ld-linux-x86-64\.so\.2"
)
# The newest symbols that manylinux_2_28 counts on (PEP 600; auditwheel's policy of that name).
_MANYLINUX = "manylinux_2_28"
_NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


LIBRARY = "core.so"  # the extension: the core, its binding and the kernels

_WRAPPED = ("-Wl,--wrap=cudaFuncSetAttribute",)

_TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python", "c10_cuda", "torch_cuda")


def needed(library: Path) -> tuple[str, ...]:
    """The shared libraries that an ELF file asks the loader for (its ``DT_NEEDED``)."""
    return needed_by(library.read_bytes())


def needed_by(content: bytes) -> tuple[str, ...]:
    """The same, of what such a file holds."""
    dynamic = ELFFile(io.BytesIO(content)).get_section_by_name(".dynamic")
    if not isinstance(dynamic, DynamicSection):
        return ()
    return tuple(tag.needed for tag in dynamic.iter_tags("DT_NEEDED"))  # type: ignore[attr-defined]  # set by the tag's kind


def too_new(library: Path) -> tuple[str, ...]:
    """The versions of the system's symbols that a library asks for and manylinux_2_28 lacks."""
    with library.open("rb") as stream:
        section = ELFFile(stream).get_section_by_name(".gnu.version_r")
        if not isinstance(section, GNUVerNeedSection):
            return ()
        asked = {version.name for _, versions in section.iter_versions() for version in versions}
    newer = set()
    for name in asked:
        kind, _, number = name.partition("_")
        numbered = kind in _NEWEST and re.fullmatch(r"[\d.]+", number)
        if numbered and tuple(map(int, number.split("."))) > _NEWEST[kind]:
            newer.add(name)
    return tuple(sorted(newer))


def platform(library: Path) -> str:
    """The platform of a wheel's tag: manylinux where the library asks for no newer system, else this."""
    return "linux_x86_64" if too_new(library) else f"{_MANYLINUX}_x86_64"


def audit(path: Path) -> tuple[str, ...]:
    """The shared libraries that a wheel's extensions need.

    Raises:
        WheelError: one that its users may not have, or that was packed into the wheel and would be there
            twice.
    """
    libraries: set[str] = set()
    try:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
            names = [name for name in archive.namelist() if re.search(r"\.so(\.\d+)*$", name)]
            for name in names:
                libraries.update(needed(Path(archive.extract(name, folder))))
    except (zipfile.BadZipFile, ELFError) as e:
        raise WheelError(f"{path} is damaged, or no wheel ({e}); build it again.") from e
    foreign = sorted(name for name in libraries if not _PRESENT.fullmatch(name))
    inside = [name for name in names if "flash_attn.libs/" in name]
    if foreign or inside or not names:
        problems = [
            *(f"needs {name}" for name in foreign),
            *(f"contains {name}" for name in inside),
            *([] if names else ["has no extension"]),
        ]
        raise WheelError(
            f"{path.name} {', '.join(problems)}; a wheel may need torch, its CUDA runtime and the system's C "
            "and C++ libraries alone."
        )
    return tuple(sorted(libraries))


def ffi_options(toolchain: Toolchain) -> list[str]:
    """What the linker is told of apache-tvm-ffi, which Python loads before us."""
    return [] if toolchain.ffi is None else [f"-L{toolchain.ffi.lib}", f"-l:{tvm_ffi.LIBRARY}"]


def link_options(toolchain: Toolchain, *, stock: bool) -> list[str]:
    """What the linker is told beside objects and folders.

    The extension is stripped. It needs the CUDA runtime by the name that torch loads, so that a process has
    one. Ours shows the functions that are called through apache-tvm-ffi alone, and needs nothing else
    (``-z defs``); stock's needs torch. Kernel files call cudaFuncSetAttribute through the core's
    ``__wrap_cudaFuncSetAttribute`` (core/launch.cpp).
    """
    runtime = f"-l:libcudart.so.{toolchain.toolkit.release.partition('.')[0]}"
    if stock:
        return ["-shared", "-s", *(f"-l{name}" for name in _TORCH_LIBRARIES), runtime]
    own = [f"-Wl,-soname,{LIBRARY}", "-Wl,-z,defs", "-Wl,--gc-sections", *_WRAPPED]
    return ["-shared", "-s", *own, runtime, f"-l:{tvm_ffi.LIBRARY}"]


def link(
    toolchain: Toolchain, objects: Sequence[Path], target: Path, log: Path, *, stock: bool = False
) -> None:
    """Link kernels and binding into the extension, stripped; one run at a time in a clone, and once."""
    with files.in_turn(log.with_suffix(".lock"), "links in this clone"):
        if not is_linked(target):
            _link(toolchain, objects, target, log, stock=stock)


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


# The symbols of ours that others may see.
_SHOWN = "{ global: __tvm_ffi_*; local: *; };\n"


def _link(toolchain: Toolchain, objects: Sequence[Path], target: Path, log: Path, *, stock: bool) -> None:
    root = toolchain.toolkit.nvcc.parent.parent
    folders = [root / "lib64", root / "lib"]
    if stock:
        env = toolchain.environment
        folders = [env.site / "torch/lib", *(folder / "lib" for folder in env.cuda), *folders]
    elif toolchain.ffi is not None:
        folders.append(toolchain.ffi.lib)
    target.parent.mkdir(parents=True, exist_ok=True)
    part, shown = target.with_name(target.name + ".part"), target.with_name(target.name + ".map")
    files.write(shown, _SHOWN)
    command: list[str | Path] = [
        toolchain.cxx,
        "-o",
        part,
        *objects,
        *(f"-L{folder}" for folder in folders if folder.is_dir()),
        *link_options(toolchain, stock=stock),
        *([] if stock else [f"-Wl,--version-script={shown}"]),
        f"-Wl,-Map={part}.map",
    ]
    run(
        command,
        error=WheelError,
        what="could not link the extension",
        hint="Objects of a damaged disk or another compiler? Delete build/kernels and build again.",
        log=log,
        without=HIDDEN_OPTIONS,
    )
    shown.unlink()
    told = Path(f"{part}.map")
    link_map = told.read_text(encoding="utf-8", errors="replace")
    told.unlink()
    if not any(name.startswith("libstdc++.so") for name in needed(part)):
        part.unlink()
        raise WheelError(
            f"{toolchain.cxx} linked libstdc++ into the extension; torch brings another, and the first C++ "
            "error that crosses between the two crashes the process. Install the compiler's shared library "
            "(Debian: g++), or set CXX to a compiler that links libstdc++.so.6."
        )
    files.write(_archives(target), json.dumps(_members_in(link_map)))
    part.replace(target)

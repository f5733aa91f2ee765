"""The compiled files of a wheel: their names, and which libraries they need.

A wheel has the kernels once, in the library. What Python loads is the binding alone, which finds the library
by a path from its own place.
"""

from __future__ import annotations

import io
import re
import tempfile
import zipfile
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from scripts.base.errors import WheelError

EXTENSION = "core.so"  # what Python loads
LIBRARY = "libflash_attention_v2.so.1"  # the core, the C++ API and the kernels
CPP = "flash_attn/cpp"  # the folder of a wheel in which all that C++ needs lies, as in the archive
LIBRARY_IN_WHEEL = f"{CPP}/lib/{LIBRARY}"

# What torch and apache-tvm-ffi load before us, and what manylinux counts on.
_PRESENT = re.compile(
    r"libcudart\.so\.\d+|libtvm_ffi\.so|lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so\.\d+|ld-linux-x86-64\.so\.2"
)
# The newest symbols that manylinux_2_28 counts on (PEP 600; auditwheel's policy of that name).
_MANYLINUX = "manylinux_2_28"
_NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


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


def platform(*libraries: Path) -> str:
    """The platform of a wheel's tag: manylinux where its libraries ask for no newer system, else this."""
    return "linux_x86_64" if any(map(too_new, libraries)) else f"{_MANYLINUX}_x86_64"


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
    if LIBRARY_IN_WHEEL in names:
        libraries.discard(LIBRARY)
    foreign = sorted(name for name in libraries if not _PRESENT.fullmatch(name))
    inside = [
        name
        for name in names
        if "flash_attn.libs/" in name or (f"{CPP}/" in name and name != LIBRARY_IN_WHEEL)
    ]
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

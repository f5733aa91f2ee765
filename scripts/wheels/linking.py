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

from scripts.base import files
from scripts.base.errors import WheelError
from scripts.base.process import run
from scripts.wheels.kernels import HIDDEN_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.wheels.toolchain import Toolchain

# What torch loads before us, and what manylinux counts on.
_PRESENT = re.compile(
    r"lib(torch|c10)\w*\.so|libcudart\.so\.\d+|lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so\.\d+|ld-linux-x86-64\.so\.2"
)


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


def audit(path: Path) -> tuple[str, ...]:
    """The shared libraries that a wheel's extensions need beside torch's and the system's.

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


def link_options(toolchain: Toolchain) -> list[str]:
    """What the linker is told beside objects and folders.

    The extension is stripped. It needs the CUDA runtime by the name that torch loads, so that a process has
    one.
    """
    major = toolchain.toolkit.release.partition(".")[0]
    return ["-shared", "-s", *(f"-l{name}" for name in _TORCH_LIBRARIES), f"-l:libcudart.so.{major}"]


def link(toolchain: Toolchain, objects: Sequence[Path], target: Path, log: Path) -> None:
    """Link kernels and binding into the extension, stripped; one run at a time in a clone, and once."""
    with files.in_turn(log.with_suffix(".lock"), "links in this clone"):
        if not is_linked(target):
            _link(toolchain, objects, target, log)


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


def _link(toolchain: Toolchain, objects: Sequence[Path], target: Path, log: Path) -> None:
    env = toolchain.environment
    folders = [
        env.site / "torch/lib",
        *(folder / "lib" for folder in env.cuda),
        toolchain.toolkit.nvcc.parent.parent / "lib64",
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    command: list[str | Path] = [
        toolchain.cxx,
        "-o",
        part,
        *objects,
        *(f"-L{folder}" for folder in folders),
        *link_options(toolchain),
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

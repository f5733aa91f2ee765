"""What a C or C++ program needs: headers, library, CMake's and pkg-config's files.

A wheel has them in ``flash_attn/cpp``, the archive in its top folder, at the same places there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base.errors import WheelError
from scripts.wheels.compiling.kernels import API
from scripts.wheels.packing import linking
from scripts.wheels.trust import binaries

if TYPE_CHECKING:
    from scripts.wheels.toolchain.compilers import Toolchain

TEMPLATES = Path(__file__).with_name("cpp")
CMAKE = "lib/cmake/FlashAttentionV2"
PKG_CONFIG = "lib/pkgconfig"
_HEADERS = ("flash_attention_v2.h", "flash_attention_v2_c.h")
_CMAKE_FILES = (
    "FlashAttentionV2Config.cmake",
    "FlashAttentionV2ConfigVersion.cmake",
    "FlashAttentionV2Targets.cmake",
)


def version(root: Path) -> str:
    """The version of the interface, as the C header of a tree says it.

    Raises:
        WheelError: it says none, or its first number is not the one that the library's file is named after.
    """
    place = root / API / _HEADERS[1]
    found = re.search(
        r'#define FLASH_ATTENTION_V2_VERSION[\s\\]+"(\d+\.\d+\.\d+)"', place.read_text(encoding="utf-8")
    )
    named = binaries.LIBRARY.rpartition(".")[2]
    if found is None or found[1].partition(".")[0] != named:
        told = found[1] if found else "none"
        raise WheelError(
            f"{place}: FLASH_ATTENTION_V2_VERSION is {told}, and the library is {binaries.LIBRARY}. Programs "
            f"find it by the first number, so change LIBRARY in {binaries.__file__} with it."
        )
    return found[1]


def files(root: Path, library: Path, toolchain: Toolchain, product: linking.Product) -> dict[str, bytes]:
    """The files by their names in the folder.

    Args:
        root: the tree whose headers they are.
        library: as it was linked.
        toolchain: which linked it.
        product: the library of a wheel, or of the archive.
    """
    told, major = version(root), toolchain.toolkit.release.partition(".")[0]
    in_wheel = product is linking.Product.LIBRARY
    # From flash_attn/cpp to the folder that torch's packages lie in too.
    beside = f"${{_flash_attention_v2_prefix}}/../../{linking.runtime_package(major)}"
    values = {
        "VERSION": told,
        "MAJOR": told.partition(".")[0],
        "LIBRARY": binaries.LIBRARY,
        "NEEDS_RUNTIME": "TRUE" if in_wheel else "FALSE",
        "PACKAGES": f'"{beside}"' if in_wheel else "",
    }
    return {
        **{f"include/{name}": (root / API / name).read_bytes() for name in _HEADERS},
        f"lib/{binaries.LIBRARY}": library.read_bytes(),
        **{f"{CMAKE}/{name}": _filled(name, values) for name in _CMAKE_FILES},
        f"{PKG_CONFIG}/flash_attention_v2.pc": _filled("flash_attention_v2.pc", values),
    }


def _filled(name: str, values: dict[str, str]) -> bytes:
    """A template with its @NAMES@ replaced."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    text = re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], text)
    return re.sub(r" +\n", "\n", text).encode()

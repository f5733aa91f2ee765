"""Decode machine code with nvdisasm, instruction by instruction."""

from __future__ import annotations

import re
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base.errors import ToolchainError
from scripts.base.process import run

if TYPE_CHECKING:
    from collections.abc import Collection

SIZE = 16  # bytes of an instruction, from compute capability 7.0 on
_PACKAGE = "nvidia-cuda-nvdisasm"
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")


def program() -> Path:
    """nvdisasm, of its package or of a toolkit on PATH.

    Raises:
        ToolchainError: there is none.
    """
    try:
        for file in metadata.files(_PACKAGE) or ():
            if file.name == "nvdisasm":
                return Path(str(file.locate()))
    except metadata.PackageNotFoundError:
        pass
    found = shutil.which("nvdisasm")
    if found is None:
        raise ToolchainError(
            f"nvdisasm is not installed: run this through nox, or pip install {_PACKAGE}, or put a "
            "toolkit that has it on PATH."
        )
    return Path(found)


def decode(architecture: str, instructions: Collection[bytes]) -> dict[bytes, str]:
    """What each instruction says, as nvdisasm writes it; targets of branches are not those of their kernel.

    Args:
        architecture: a compute capability, such as 90.
        instructions: of :data:`SIZE` bytes each; a million take ten seconds.

    Raises:
        ToolchainError: nvdisasm is not there, or leaves some out.
    """
    asked = sorted(set(instructions))
    if not asked:
        return {}
    with tempfile.TemporaryDirectory(prefix="fa2-sass-") as folder:
        raw = Path(folder) / "code"
        raw.write_bytes(b"".join(asked))
        told = run(
            [program(), "--binary", f"SM{architecture}", raw],
            error=ToolchainError,
            what="could not decode machine code",
        )
    words = {int(place, 16) // SIZE: text for place, text in _LINE.findall(told)}
    if len(words) != len(asked):
        raise ToolchainError(
            f"nvdisasm decoded {len(words)} of {len(asked)} instructions of sm_{architecture}; is it too old?"
        )
    return {instruction: words[place] for place, instruction in enumerate(asked)}

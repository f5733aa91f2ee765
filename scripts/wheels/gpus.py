"""The GPUs of this machine, as their driver tells."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from scripts.base.errors import BuildError, ToolchainError
from scripts.base.process import run

_FIELDS = ("uuid", "name", "compute_cap", "driver_version")


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    uuid: str
    name: str
    compute_capability: str  # such as 9.0
    driver: str  # such as 580.82.07


def found() -> tuple[Gpu, ...]:
    """The GPUs; none where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        text = run(
            [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"],
            error=ToolchainError,
            what="the driver does not tell its GPUs",
        )
    except BuildError:
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return tuple(Gpu(*row) for row in rows if len(row) == len(_FIELDS))

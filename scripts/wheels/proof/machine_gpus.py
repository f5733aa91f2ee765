"""The GPUs of this machine, as their driver tells."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.base.errors import BuildError, ToolchainError
from scripts.base.process import run
from scripts.source import gpus
from scripts.source.matrix_checks import too_early
from scripts.source.matrix_tables import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Sequence

# The first branch of NVIDIA's driver that serves a major release of CUDA.
_DRIVERS = {"12": 525, "13": 580}
_FIELDS = ("uuid", "name", "compute_cap", "driver_version", "memory.total")


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    uuid: str
    name: str
    compute_capability: str  # such as 9.0
    driver: str  # such as 580.82.07
    memory: str = ""  # such as 81559, in MiB; some drivers have no word for it

    @property
    def gib(self) -> int:
        """Its memory, in whole GiB; 0: the driver does not tell.

        >>> Gpu("GPU-1", "H100", "9.0", "580.82.07", "81559").gib, Gpu("GPU-1", "", "9.0", "1", "[N/A]").gib
        (79, 0)
        """
        return int(self.memory) // 1024 if self.memory.isdigit() else 0


def found() -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, or all; none where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        text = run(
            [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"],
            error=ToolchainError,
            what="the driver does not tell its GPUs",
        )
    except BuildError:
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return _visible([Gpu(*row) for row in rows if len(row) == len(_FIELDS)])


def _visible(listed: list[Gpu]) -> tuple[Gpu, ...]:
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    if words is None:
        return tuple(listed)
    left = []
    for word in filter(None, (word.strip() for word in words.split(","))):
        left += [
            gpu
            for at, gpu in enumerate(listed)
            if word == str(at) or (gpu.uuid.startswith(word) and "-" in word)
        ]
    return tuple(left)


def first_driver(cuda: str) -> int:
    """The first branch of NVIDIA's driver that serves a CUDA release; 0 of a wheel that names none.

    Raises:
        ToolchainError: it is not known here, so that no driver is taken for one that serves it.

    >>> first_driver("13.0"), first_driver("")
    (580, 0)
    """
    major = cuda.partition(".")[0]
    if major and major not in _DRIVERS:
        raise ToolchainError(
            f"which driver serves CUDA {major} is not known here; write its first branch into _DRIVERS of "
            "scripts/wheels/proof/machine_gpus.py."
        )
    return _DRIVERS[major] if major else 0


def runs(gpu: Gpu, architectures: Sequence[str], cuda: str) -> bool:
    """Whether a GPU runs machine code of these compute capabilities, and its driver this CUDA.

    >>> h100 = Gpu("GPU-1", "H100", "9.0", "580.82.07")
    >>> runs(h100, ("80", "90"), "13.0"), runs(h100, ("80",), "13.0"), runs(h100, (), "")
    (True, False, True)
    >>> runs(Gpu("GPU-2", "RTX 4090", "8.9", "550.54"), ("80",), "12.4")
    True
    >>> runs(Gpu("GPU-2", "RTX 4090", "8.9", "550.54"), ("80",), "13.0")
    False
    """
    fits = not architectures or any(gpus.runs(each, gpu.compute_capability) for each in architectures)
    branch = int(gpu.driver.partition(".")[0]) if gpu.driver[:1].isdigit() else 0
    return fits and branch >= first_driver(cuda)


def wanted(architectures: Sequence[str], cuda: str) -> str:
    """What :func:`runs` asks for, in words.

    >>> wanted(("80", "90"), "13.0")
    'compute capability 8.0 or 9.0, and a driver from 580'
    """
    words = " or ".join(f"{a[:-1]}.{a[-1]}" for a in architectures)
    driver = first_driver(cuda)
    return f"compute capability {words or 'any'}" + (f", and a driver from {driver}" if driver else "")


def unserved(found: Sequence[Gpu], architectures: Sequence[str], cuda: str) -> str | None:
    """That no GPU of a machine runs code for these compute capabilities, in words; None where one does.

    ``cuda``: the release that it is compiled with.

    >>> unserved([Gpu("GPU-1", "RTX 4090", "8.9", "580.1")], ("90",), "13.0")
    "this machine's RTX 4090 (compute capability 8.9) runs nothing for 9.0; --arch 89 is for it"
    >>> unserved([Gpu("GPU-1", "RTX 5090", "12.0", "580.1")], ("90",), "12.4")
    "this machine's RTX 5090 (compute capability 12.0) runs nothing for 9.0; CUDA 12.4 has nothing for it"
    >>> unserved([Gpu("GPU-1", "A30", "8.0", "1"), Gpu("GPU-2", "H200", "9.0", "1")], ("90",), "13.0")
    >>> unserved([], ("90",), "13.0")
    """
    if not found or any(gpus.runs(each, gpu.compute_capability) for each in architectures for gpu in found):
        return None
    kinds = {gpu.compute_capability: gpu.name for gpu in found}
    has = ", ".join(f"{name} (compute capability {capability})" for capability, name in kinds.items())
    runs_for = " or ".join(f"{a[:-1]}.{a[-1]}" for a in architectures)
    names = [capability.replace(".", "") for capability in kinds]
    fitting = [name for name in names if name in ARCHITECTURES and not too_early(cuda, (name,))]
    way = f"--arch {','.join(fitting)} is for it" if fitting else f"CUDA {cuda} has nothing for it"
    return f"this machine's {has} runs nothing for {runs_for}; {way}"

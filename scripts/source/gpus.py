"""The GPUs that people have, by compute capability, and which machine code runs on which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Gpu:
    """One compute capability, by the names of its GPUs."""

    capability: str  # such as 9.0
    names: str

    @property
    def architecture(self) -> str:
        """As ``wheel_matrix.toml`` spells it, such as ``90``."""
        return self.capability.replace(".", "")


# Of machines with an x86-64 processor: wheels are for those. Jetson and DGX Spark have Arm processors.
GPUS = (
    Gpu("9.0", "H100, H200"),
    Gpu("8.0", "A100, A30"),
    Gpu("8.6", "RTX 30, A10, A40"),
    Gpu("8.9", "RTX 40, L4, L40S"),
    Gpu("12.0", "RTX 50, RTX PRO Blackwell"),
    Gpu("10.0", "B200"),
    Gpu("10.3", "B300"),
)


def runs(architecture: str, capability: str) -> bool:
    """Whether machine code for an architecture runs on a GPU: the same major version, and no later minor.

    Args:
        architecture: as ``wheel_matrix.toml`` spells it, such as ``90``.
        capability: such as ``9.0``; of a GPU whose driver tells none, such as ``[N/A]``, nothing runs.

    >>> runs("80", "8.9"), runs("89", "8.0"), runs("90", "12.0"), runs("100", "10.3"), runs("80", "[N/A]")
    (True, False, False, True, False)
    """
    major, _, minor = capability.partition(".")
    return architecture[:-1] == major and int(architecture[-1]) <= int(minor or 0)


def serving(architectures: Iterable[str]) -> tuple[Gpu, ...]:
    """The GPUs that run machine code for some of these architectures.

    >>> [gpu.capability for gpu in serving(["80", "90"])]
    ['9.0', '8.0', '8.6', '8.9']
    """
    wanted = tuple(architectures)
    return tuple(gpu for gpu in GPUS if any(runs(each, gpu.capability) for each in wanted))

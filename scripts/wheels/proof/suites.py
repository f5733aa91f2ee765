"""Which suite proves which wheel, and what it is installed with."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.base.errors import UsageError
from scripts.wheels.packing.metadata import PROVENANCE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from scripts.wheels.proof.machine_gpus import Gpu


@dataclass(frozen=True)
class Suite:
    """What proves the wheels of one distribution."""

    folder: str  # in tests/
    pattern: str  # of wheels' names
    provenance: str  # its place in a wheel
    beside: tuple[str, ...] = ()  # folders of tests/ that it takes modules from
    torch: str = ""  # for a wheel that names none
    requirements: tuple[str, ...] = ()  # for a wheel whose own leave the version open, of which bits depend
    upstream: bool = True  # whether it runs upstream's own tests
    cpp: bool = False  # whether it runs the C++ API's tests, where there is a GPU
    remembered: str = ""  # where in the user's cache it notes what compiles, if it does
    processes: int = 1  # run its cases, at most, each on a core
    roomy: int = 0  # GiB of the GPU's memory from which on there are several, if there is a GPU
    by_file: bool = False  # on a GPU a file's cases stay in one process, which makes what they share once

    def parallel(self, gpus: Sequence[Gpu], *, untold: bool = False) -> tuple[str, ...]:
        """The arguments of pytest-xdist on a machine with these GPUs, of which a suite uses the first.

        untold: torch has a GPU, and the driver does not tell which. Without any, no memory of one is shared,
        and cases of one file share nothing.
        """
        count = min(self.processes, os.cpu_count() or 1)
        if self.roomy and (untold or (gpus and gpus[0].gib < self.roomy)):
            count = 1
        dist = "loadfile" if self.by_file and gpus else "worksteal"
        return ("--numprocesses", str(count), "--dist", dist) if count > 1 else ()

    def proves(self, name: str) -> bool:
        """Whether it is for a wheel of this name."""
        return re.fullmatch(self.pattern, name) is not None


SUITES = (
    Suite(
        "wheel",
        r"flash_attn-[^-]+(?:-\d[^-]*)?-py3-none-(?:many)?linux\w*_x86_64\.whl",
        PROVENANCE,
        cpp=True,
        processes=8,
        roomy=72,  # a case takes up to 30 while others run
        by_file=True,
    ),
    Suite(
        "wheel4",
        r"flash_attn_4-[^-]+-py3-none-any\.whl",
        "flash_attn/cute/_fork.json",
        beside=("wheel",),
        torch="2.11.0",
        requirements=(
            "nvidia-cutlass-dsl[cu13]==4.8.1",
            "quack-kernels==0.6.5",
            "apache-tvm-ffi==0.1.15.post2",
            "torch-c-dlpack-ext==0.1.5",
        ),
        upstream=False,
        remembered="flash-attn-4-compiles",
        processes=8,  # kernels are compiled, each on a core
    ),
)


def of(path: Path) -> Suite:
    """The suite that proves a wheel, by its name.

    Raises:
        UsageError: it is no wheel of this project.
    """
    for suite in SUITES:
        if suite.proves(path.name):
            return suite
    raise UsageError(
        f"{path.name} is no wheel of this project (flash_attn-VERSION-KERNELS-py3-none-PLATFORM.whl or "
        "flash_attn_4-VERSION-py3-none-any.whl)."
    )

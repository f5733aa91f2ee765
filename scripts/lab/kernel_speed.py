"""Measure a wheel's kernels on a GPU beside upstream's of the same pin.

``tests/wheel/bench.py`` measures, with nothing but torch and the wheel; this builds what it measures.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console, layout
from scripts.base.errors import NotVerified, VerifyError
from scripts.wheels.building import build, jobs
from scripts.wheels.proof import verify

if TYPE_CHECKING:
    from scripts.source import matrix

KERNELS = "hdim64,hdim128,fp16"
SUITE = layout.ROOT / "tests/wheel"


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def require_gpu() -> None:
    """Say where else one could measure, where there is no GPU here.

    Raises:
        NotVerified: there is none.
    """
    if not _has_gpu():
        raise NotVerified(
            "nothing was measured: there is no CUDA device here. On a GPU host run this; or build here (nox "
            f"-s build -- --kernels {KERNELS}, and the same with --stock), and there python "
            "tests/wheel/bench.py --stock EXTENSION --json bench.json, then here nox -s bench -- kernels "
            "--from bench.json."
        )


def measure(loaded: matrix.Matrix, job: jobs.Job, options: build.BuildOptions, result: Path) -> None:
    """Build the wheel and stock's extension, and run the benchmark with both, in an environment of their own.

    Raises:
        VerifyError: the benchmark failed.
    """
    place = build.Place(layout.BUILD, layout.BUILD / "bench" / "dist", cache=True)
    made, stock = (
        build.build_one(loaded, job, replace(options, stock=stock), place).path for stock in (False, True)
    )
    facts = verify.facts_of(made)
    environments = layout.BUILD / "env"
    with tempfile.TemporaryDirectory(dir=environments, prefix="bench-") as folder:
        python = verify.installed(facts, Path(folder) / "venv", layout.BUILD / "logs")
        console.step("Measuring")
        dims = sorted({kernel.head_dim for kernel in job.kernels})
        command = [python, SUITE / "bench.py", "--stock", stock.resolve(), "--json", result.resolve()]
        command += ["--head-dim", *dims]
        status = subprocess.run(
            [str(c) for c in command], cwd=folder, env={**os.environ, "PYTHONPATH": ""}, check=False
        ).returncode
    if status != 0:
        raise VerifyError(f"the benchmark failed: it exited with {status}; its output is above.")

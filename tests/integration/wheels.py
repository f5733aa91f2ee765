"""The commands as a user calls them, and the wheel of one kernel file that tests share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "hdim32,fp16,fwd,causal"  # the file that compiles fastest; its PTX is emulated too


def scripts(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of this repository; what it said, and how it ended."""
    return subprocess.run(
        [sys.executable, "-m", "scripts", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def build(out: Path, *arguments: str) -> str:
    """Build the wheel, or with ``--cpp`` the archive, of that file; what the command said."""
    done = scripts("build", "--kernels", KERNELS, "--source", "sdist", "--out", out, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

"""Our own C++ and CUDA, by the tool that formats it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.conftest import ROOT


def test_they_are_formatted() -> None:
    files = sorted(path for path in (ROOT / "fork").rglob("*") if path.suffix in {".h", ".cpp", ".cu"})
    assert len(files) > 60
    program = Path(sys.executable).with_name("clang-format")
    style = f"--style=file:{ROOT / '.clang-format'}"
    done = subprocess.run(
        [program, "--dry-run", "--Werror", style, *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

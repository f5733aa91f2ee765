from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.conftest import ROOT


def test_a_session_s_answer_is_alone_on_stdout() -> None:
    """``nox -s NAME -- --json > answer.json`` is JSON: what nox and people are told goes elsewhere."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [
        sys.executable,
        "-m",
        "nox",
        "--force-venv-backend",
        "none",
        "--no-install",
        "-s",
        "lint",
        "--",
        "--json",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    json.loads(done.stdout)
    assert "Session lint was successful" in done.stderr

"""The build backend that cibuildwheel's frontend calls inside a container (PEP 517).

:mod:`scripts.wheels.building.containers` puts it there.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


def build_wheel(
    wheel_directory: str,
    config_settings: object = None,  # noqa: ARG001
    metadata_directory: str | None = None,  # noqa: ARG001
) -> str:
    """Build what FORK_BUILD asks for, from the project that this package lies in.

    Returns:
        The wheel's file name.
    """
    project = Path.cwd().parent  # a frontend calls hooks in the package's folder
    with tempfile.TemporaryDirectory(dir=wheel_directory) as folder:
        command = [
            sys.executable,
            "-m",
            "scripts",
            "build",
            "--out",
            folder,
            *shlex.split(os.environ["FORK_BUILD"]),
        ]
        subprocess.run(command, cwd=project, check=True)
        (made,) = Path(folder).glob("*.whl")
        made.replace(Path(wheel_directory) / made.name)
        return made.name

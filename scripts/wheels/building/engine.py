"""The program that runs containers: docker, or a podman with settings of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.base import files
from scripts.base.errors import ToolchainError


@dataclass(frozen=True)
class Engine:
    """A program that runs containers, and what its settings are."""

    name: str  # docker or podman
    environment: dict[str, str]
    wrapper: tuple[str, ...]  # runs before what uses the engine


def _settings(folder: Path) -> dict[str, str]:
    """A podman of our own: images under ``folder``, no cgroups, no bridge.

    It runs where a machine's own could not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store, settings = folder / "storage.conf", folder / "containers.conf"
    files.write(
        store,
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder / "store"}"\nrunroot = "{folder / "run"}"\n',
    )
    files.write(
        settings,
        '[containers]\ncgroups = "disabled"\nnetns = "host"\n'
        'default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]\n'
        f'[engine]\nevents_logger = "none"\ntmp_dir = "{folder / "tmp"}"\n',
    )
    return {"CONTAINERS_STORAGE_CONF": str(store), "CONTAINERS_CONF": str(settings)}


def _wrapper() -> tuple[str, ...]:
    """Hide the second kind of cgroups, in a namespace: crun refuses a machine with both."""
    unified = Path("/sys/fs/cgroup/unified")
    if not unified.is_dir() or os.geteuid() != 0:
        return ()
    return (
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        f'umount {unified}; exec "$@"',
        "sh",
    )


def find_engine(image: str, folder: Path) -> Engine:
    """Docker, or podman where there is none or the image is of our own making.

    :func:`scripts.wheels.building.image.make_image` made such an image.

    Raises:
        ToolchainError: neither works.
    """
    local = image.startswith("localhost/")
    if (
        not local
        and shutil.which("docker")
        and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0
    ):
        return Engine("docker", {}, ())
    if shutil.which("podman"):
        return Engine("podman", _settings(folder), _wrapper())
    raise ToolchainError(
        "no container engine: docker does not answer and podman is not installed. "
        "Install one (Debian, Ubuntu: apt install podman crun)."
    )


def podman(engine: Engine, *arguments: str) -> int:
    """A command's exit status."""
    return subprocess.run(
        [*engine.wrapper, "podman", *arguments],
        env={**os.environ, **engine.environment},
        capture_output=True,
        check=False,
    ).returncode

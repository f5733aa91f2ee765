"""Bring packages of Debian's, and put together a CUDA toolkit whose compiler the package index lacks.

The compiler is Debian's, the headers are the index's of the same release.

Debian's package holds CUDA's own programs, placed elsewhere; here they get the places that nvcc looks in.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx2
from debian.arfile import ArError
from debian.debfile import DebError, DebFile

from scripts.base import pip
from scripts.base.errors import ToolchainError
from scripts.base.fetch import OtherContentError, fetch
from scripts.base.process import run

if TYPE_CHECKING:
    from scripts.source.matrix_tables import Assembled

MIRROR = "DEBIAN_MIRROR"
_OWN = PurePosixPath("usr/lib/nvidia-cuda-toolkit")
_PROGRAMS = ("cudafe++", "ptxas", "fatbinary", "nvlink", "bin2c", "cuobjdump", "nvdisasm")
# The package's own names places under /usr.
_PROFILE = """TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/$(_NVVM_BRANCH_)/libdevice
PATH += $(TOP)/$(_NVVM_BRANCH_)/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
"""


def place(name: str) -> PurePosixPath | None:
    """Where a file of the package goes in a toolkit, or None for one that compiling does not need.

    >>> place("./usr/lib/nvidia-cuda-toolkit/bin/cicc")
    PurePosixPath('nvvm/bin/cicc')
    >>> place("./usr/bin/ptxas")
    PurePosixPath('bin/ptxas')
    >>> place("./usr/bin/nvcc")  # a script that starts the other one
    """
    path = PurePosixPath(name.removeprefix("./"))
    if path.parent == PurePosixPath("usr/bin"):
        return PurePosixPath("bin", path.name) if path.name in _PROGRAMS else None
    if path == _OWN / "bin/nvcc" or path.parent == _OWN / "bin/crt":
        return path.relative_to(_OWN)
    if path == _OWN / "bin/cicc":
        return PurePosixPath("nvvm/bin/cicc")
    return PurePosixPath("nvvm") / path.relative_to(_OWN) if path.parent == _OWN / "libdevice" else None


def unpack(package: Path, toolkit: Path) -> None:
    """Write the compiler of a Debian package into a toolkit's folders.

    Raises:
        ToolchainError: it is no Debian package, or has no compiler.
    """
    try:
        with DebFile(str(package)) as opened, opened.data.tgz() as archive:
            for member in archive:
                inside = place(member.name)
                if inside is None or not member.isfile():
                    continue
                target = toolkit / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(member)
                if content is not None:
                    with target.open("wb") as file:
                        shutil.copyfileobj(content, file)
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (ArError, DebError, tarfile.TarError, OSError) as e:
        raise ToolchainError(f"{package.name} cannot be unpacked: {e}.") from e
    if not (toolkit / "bin/nvcc").is_file() or not (toolkit / "nvvm/bin/cicc").is_file():
        raise ToolchainError(
            f"{package.name} has no nvcc where Debian's package of CUDA has it; "
            "is package in [toolkits] of wheel_matrix.toml right?"
        )
    (toolkit / "bin/nvcc.profile").write_text(_PROFILE, encoding="utf-8")


def mirror() -> str:
    """The Debian mirror: ``DEBIAN_MIRROR``, or that of the machine's apt.

    Raises:
        ToolchainError: neither names one.
    """
    if named := os.environ.get(MIRROR):
        return named.rstrip("/")
    try:
        listed = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI)"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
    except OSError:
        listed = ""
    for line in listed.splitlines():
        if re.fullmatch(r"https?://.+/debian/?", line):
            return line.rstrip("/")
    raise ToolchainError(
        "this machine's apt names no Debian mirror to fetch the CUDA compiler from; "
        f"set {MIRROR} to the URL of one."
    )


def _headers(requirements: tuple[str, ...], toolkit: Path, temporary: Path, log: Path) -> None:
    """Install packages of the index and gather their headers and libraries in the toolkit."""
    site = temporary / "headers"
    command = pip.installing(sys.executable, "--no-deps", "--target", site, *requirements)
    run(command, error=ToolchainError, what="could not install CUDA's headers", hint=pip.HINT, log=log)
    for folder in sorted((*site.glob("nvidia/*/include"), *site.glob("nvidia/*/lib"))):
        shutil.copytree(folder, toolkit / folder.name, dirs_exist_ok=True)
    if not (toolkit / "include/cuda_runtime.h").is_file():
        raise ToolchainError(
            f"{', '.join(requirements)} hold no cuda_runtime.h; are headers in [toolkits] of "
            "wheel_matrix.toml right?"
        )


def bring(package: str, sha256: str, folder: Path, *, says: str, otherwise: str) -> Path:
    """Download a package of Debian's into a folder.

    Args:
        package: its path on a mirror, such as ``pool/main/g/googletest/googletest_1.12.1-0.2_all.deb``.
        sha256: of its content.
        folder: where it goes.
        says: what names that sha256, for the message.
        otherwise: what the user may do without the package, for the message.

    Raises:
        ToolchainError: it cannot be had, or is another.
    """
    url = f"{mirror()}/{quote(package, safe='/+~')}"
    target = folder / PurePosixPath(package).name
    try:
        with pip.PipConfig.read().client() as client:
            fetch(client, url, target, sha256)
    except OtherContentError as e:
        raise ToolchainError(f"{url} has sha256 {e.digest}, {says} {sha256}. It was not kept.") from e
    except (httpx2.HTTPError, OSError) as e:
        raise ToolchainError(
            f"could not fetch {url}: {e or type(e).__name__}. Check the network, set {MIRROR} to the "
            f"URL of another Debian mirror, or {otherwise}."
        ) from e
    return target


def assemble(assembled: Assembled, folder: Path, log: Path) -> None:
    """Make the toolkit in ``folder``, whose parent exists: aside, then renamed.

    Raises:
        ToolchainError: the package or the headers cannot be had, or are not what the matrix says.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as name:
        temporary = Path(name)
        package = bring(
            assembled.package,
            assembled.sha256,
            temporary,
            says="[toolkits] of wheel_matrix.toml says",
            otherwise="install this CUDA and set CUDA_HOME",
        )
        toolkit = temporary / "toolkit"
        unpack(package, toolkit)
        _headers(assembled.headers, toolkit, temporary, log)
        toolkit.replace(folder)

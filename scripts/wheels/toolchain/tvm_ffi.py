"""apache-tvm-ffi, which the extension's functions are called through: its headers and its library."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.base import console, files, pip
from scripts.base.errors import ToolchainError
from scripts.base.process import run

VERSION = "0.1.15.post2"
# What a wheel asks for: releases that have all it calls. vLLM 0.26 takes 0.1.10 and no other.
REQUIREMENT = "apache-tvm-ffi>=0.1.10,<0.2"
LIBRARY = "libtvm_ffi.so"
# Earlier releases of torch have no exchange of tensors in C: this package brings it.
EXCHANGE = "torch-c-dlpack-ext>=0.1.5"
TORCH_WITHOUT_EXCHANGE = ("2.4.0", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1")
# The ones among them of the C++ ABI before C++11, for which apache-tvm-ffi compiles that when it is imported.
# torch compiles with this package, and asks for it on Python 3.12 and later alone.
COMPILER = "setuptools>=65"
TORCH_OF_OLD_ABI = ("2.4.0", "2.5.1", "2.6.0")


@dataclass(frozen=True)
class TvmFfi:
    """Headers and library of a release, whatever Python they came for."""

    root: Path

    @property
    def include(self) -> Path:
        """Headers, those of DLPack among them."""
        return self.root / "include"

    @property
    def lib(self) -> Path:
        """The library's folder."""
        return self.root / "lib"


def installed(shared: Path, log: Path) -> TvmFfi:
    """The release in a folder that every clone shares: its path goes into the compile cache's keys."""
    folder = shared / VERSION
    with files.in_turn(shared / "lock", "installs apache-tvm-ffi"):
        if not folder.is_dir():
            console.step(f"Installing apache-tvm-ffi {VERSION}")
            _install(folder, log)
    return TvmFfi(folder)


def _install(folder: Path, log: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as temporary:
        site, kept = Path(temporary) / "site", Path(temporary) / "kept"
        command = pip.installing(
            sys.executable,
            "--no-deps",
            "--only-binary",
            ":all:",
            "--target",
            site,
            f"apache-tvm-ffi=={VERSION}",
        )
        run(command, error=ToolchainError, what="could not install apache-tvm-ffi", hint=pip.HINT, log=log)
        kept.mkdir()
        for name in ("include", "lib"):
            shutil.move(site / "tvm_ffi" / name, kept / name)
        kept.replace(folder)

"""Engines that serve models, installed beside the emulator: their classes around kernels that run here."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from typing import TYPE_CHECKING

from scripts.base import console, files, layout, pip
from scripts.base.errors import CompileError, ToolchainError
from scripts.base.process import run
from scripts.wheels.packing import metadata

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.wheels.toolchain.compilers import Toolchain
    from scripts.wheels.toolchain.torch_environment import Environment

_SUITE = layout.ROOT / "tests/emulator"
NAMES = tuple(path.stem for path in sorted(_SUITE.glob("*.txt")))
# Of CUDA's driver, which their libraries are linked with, what is looked for as they load: it finds no GPU.
_DRIVER = 'extern "C" int cuPointerGetAttribute() { return 100; }\n'


def tests_of(client: str | None) -> list[str]:
    """The suite as words for pytest: a client's tests alone; or, for None, those that need no client."""
    if client is not None:
        return [str(_SUITE / f"test_{client}.py")]
    return [str(_SUITE), *(f"--ignore={_SUITE / f'test_{name}.py'}" for name in NAMES)]


def site(env: Environment, folder: Path, name: str, requirements: list[str]) -> Path:
    """Packages for the environment's Python, beside it and without their dependencies: it is the wheels' own.

    Raises:
        ToolchainError: an install failed.
    """
    place = folder / f"{name}-{env.tag}-{hashlib.sha256(repr(requirements).encode()).hexdigest()[:8]}"
    if not place.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            target = f"{temporary}/site"
            command = pip.installing(env.python, "--no-deps", "--target", target, *requirements)
            run(command, error=ToolchainError, what=f"could not install {name}'s packages", hint=pip.HINT)
            shutil.move(target, place)
    return place


def announced(root: Path, folder: Path) -> Path:
    """A folder by which clients find the plugins of a work tree's ``flash_attn``: what pip writes of a wheel.

    Args:
        root: of the work tree.
        folder: where it is made.
    """
    info = folder / "plugins/flash_attn-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    files.write(info / "METADATA", "Metadata-Version: 2.1\nName: flash_attn\nVersion: 0\n")
    files.write(info / "entry_points.txt", metadata.entry_points(root))
    return info.parent


def beside(client: str, tools: Toolchain, folder: Path) -> tuple[Path, Path]:
    """A client's packages, and a folder with a driver library that finds no GPU.

    Raises:
        ToolchainError: an install failed.
        CompileError: the C++ compiler failed.
    """
    console.step(f"Installing {client} (some GB the first time)")
    lines = (_SUITE / f"{client}.txt").read_text(encoding="utf-8").splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    driver = folder / "driver"
    if not (driver / "libcuda.so.1").exists():
        driver.mkdir(parents=True, exist_ok=True)
        source, part = driver / "driver.cpp", driver / "libcuda.so.part"
        source.write_text(_DRIVER, encoding="utf-8")
        command: list[str | Path] = [
            tools.cxx,
            "-shared",
            "-fPIC",
            "-Wl,-soname,libcuda.so.1",
            source,
            "-o",
            part,
        ]
        run(command, error=CompileError, what="could not compile a driver library")
        part.replace(driver / "libcuda.so.1")
    return site(tools.environment, folder, client, requirements), driver

"""A virtual environment with a target's torch, to compile the binding against."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.base import console, files, pip
from scripts.base.errors import ToolchainError
from scripts.base.process import run

if TYPE_CHECKING:
    from scripts.source.matrix import Target

_READY = "ready.json"
_READY_FORMAT = 2


@dataclass(frozen=True)
class Environment:
    """A virtual environment with a target's torch, to compile against."""

    python: Path
    site: Path
    tag: str  # cp312
    include: Path  # Python.h
    torch: str
    torch_cuda: str
    cxx11_abi: bool
    pybind: tuple[
        str, ...
    ] = ()  # definitions by which its pybind11 knows ours: translated exceptions are shared under them

    @property
    def cuda(self) -> tuple[Path, ...]:
        """Folders with ``include`` and ``lib`` of the CUDA libraries that torch depends on.

        There is one from CUDA 13, and one a library before.
        """
        whole = self.site / "nvidia" / f"cu{self.torch_cuda.partition('.')[0]}"
        return (
            (whole,)
            if whole.is_dir()
            else tuple(sorted(path.parent for path in self.site.glob("nvidia/*/include")))
        )


_PROBE = """
import json, sysconfig, torch
pybind = {n: getattr(torch._C, f"_PYBIND11_{n}", None) for n in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")}
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "abi": bool(torch._C._GLIBCXX_USE_CXX11_ABI),
    "site": sysconfig.get_path("purelib"), "include": sysconfig.get_path("include"),
    "tag": "cp" + sysconfig.get_config_var("py_version_nodot"),
    "pybind": [f'-DPYBIND11_{n}="{v}"' for n, v in pybind.items() if v],
}))
"""


def environment(target: Target, python: Path, version: str, folder: Path, logs: Path) -> Environment:
    """The target's environment under ``folder``; made when it is not there, or was not finished."""
    with files.in_turn(folder / f"{target.name}-py{version}.lock", "installs this environment"):
        return _made_environment(target, python, version, folder, logs)


def _made_environment(target: Target, python: Path, version: str, folder: Path, logs: Path) -> Environment:
    root = folder / f"{target.name}-py{version}"
    binary, marker = root / "bin/python", root / _READY
    if marker.is_file():
        facts = json.loads(marker.read_text(encoding="utf-8"))
        if facts["wanted"] == target.reference_torch:
            return _environment(
                binary, facts if facts.get("format") == _READY_FORMAT else _probe(binary, target, marker)
            )
    console.step(f"Installing torch {target.reference_torch} for Python {version} (some GB the first time)")
    shutil.rmtree(root, ignore_errors=True)
    run(
        pip.making(python, root),
        error=ToolchainError,
        what="could not make a virtual environment",
        hint=pip.HINT,
    )
    # Also what upstream's setup.py asks for as it runs, and would have pip fetch, which need not be there.
    build = ("setuptools>=77", "wheel>=0.45", "packaging", "psutil", "ninja")
    run(
        pip.installing(binary, torch_for_cuda(target.reference_torch), *build, "numpy"),
        error=ToolchainError,
        what=f"could not install torch {target.reference_torch}",
        hint=pip.HINT,
        log=logs / f"environment-{root.name}.log",
    )
    return _environment(binary, _probe(binary, target, marker))


def torch_for_cuda(version: str) -> str:
    """What pip is asked for.

    A folder on the machine may hold a build for the CPU, which "==" alone prefers: it counts as newer.
    """
    return f"torch=={version}" if "+" in version else f"torch=={version},!={version}+cpu"


def _probe(binary: Path, target: Target, marker: Path) -> dict[str, Any]:
    """Ask the environment's torch what the binding must be compiled for; check and keep it."""
    facts: dict[str, Any] = json.loads(
        run([binary, "-c", _PROBE], error=ToolchainError, what="torch was installed but cannot be imported")
    )
    if facts["torch"].split("+")[0] != target.reference_torch or facts["cuda"] != target.cuda:
        built = f"CUDA {facts['cuda']}" if facts["cuda"] else "the CPU alone"
        raise ToolchainError(
            f"torch {facts['torch']} was installed, built for {built}; target {target.name} needs torch "
            f"{target.reference_torch} for CUDA {target.cuda}. A local index or find-links in pip's "
            "configuration may offer another build (pip config list)."
        )
    facts |= {"format": _READY_FORMAT, "wanted": target.reference_torch}
    files.write(marker, json.dumps(facts) + "\n")
    return facts


def _environment(binary: Path, facts: dict[str, Any]) -> Environment:
    return Environment(
        binary,
        Path(facts["site"]),
        facts["tag"],
        Path(facts["include"]),
        facts["torch"],
        facts["cuda"],
        bool(facts["abi"]),
        tuple(facts["pybind"]),
    )


def check_headers(env: Environment) -> None:
    """Python's C headers, which Debian and others package apart: better missed now than after the kernels."""
    if not (env.include / "Python.h").is_file():
        version = f"{env.tag[2]}.{env.tag[3:]}"
        raise ToolchainError(
            f"Python {version} has no Python.h in {env.include}. Install its headers (Debian, Ubuntu: "
            f"apt install python{version}-dev)."
        )

"""Find or install what compiles a target: a CUDA toolkit, torch, a host compiler, a compile cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console, files, layout, pip
from scripts.base.errors import ToolchainError
from scripts.base.process import run
from scripts.wheels.toolchain import debian, torch_environment, tvm_ffi

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.source.matrix import Target

# What kernels need of the package index's toolkit: the compiler, its device code optimiser, cuda_runtime.h
# and its parts, and libcu++. Headers of cuBLAS and the like, which torch's own include, come with torch.
TOOLKIT_PARTS = ("nvcc", "nvvm", "crt", "cccl", "cudart")


@dataclass(frozen=True)
class Toolkit:
    """A CUDA compiler and its headers."""

    nvcc: Path
    release: str  # 13.0
    version: str  # V13.0.88
    include: tuple[Path, ...]
    why: str
    takes_seed: bool = True  # --frandom-seed, which earlier releases lack


@dataclass(frozen=True)
class Toolchain:
    """All that a build of one target runs; with an environment, stock's binding and tests too."""

    toolkit: Toolkit
    cxx: Path
    cxx_version: str
    ninja: Path
    sccache: Path | None
    for_python: torch_environment.Environment | None
    ffi: tvm_ffi.TvmFfi | None = None  # for the core's binding

    @property
    def environment(self) -> torch_environment.Environment:
        """Torch and Python, for what includes their headers."""
        if self.for_python is None:
            raise ToolchainError(
                "this needs torch and Python, and the toolchain was assembled without; "
                "this is a fault of the build system."
            )
        return self.for_python


def find_python(version: str | None) -> Path:
    """The interpreter of this version (``3.12``): the one running, one on PATH, or one of pyenv's."""
    running = running_python()
    if version is None or version == running:
        return Path(sys.base_prefix) / "bin" / f"python{running}"
    roots = sorted(
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin")
    )
    for candidate in [shutil.which(f"python{version}"), *(str(root / f"python{version}") for root in roots)]:
        if (
            candidate
            and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0
        ):
            return Path(candidate)
    raise ToolchainError(
        f"no python{version} on PATH or among pyenv's versions. Install it, or build for {running}."
    )


def running_python() -> str:
    """The version of this interpreter, such as 3.12."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _nvcc_version(nvcc: Path) -> tuple[str, str] | None:
    """Release and full version that ``nvcc --version`` prints."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    match = re.search(r"release (\d+\.\d+), (V[\d.]+)", text)
    return (match[1], match[2]) if match else None


def _takes_seed(nvcc: Path) -> bool:
    return "--frandom-seed" in run([nvcc, "--help"], error=ToolchainError, what=f"{nvcc} does not work")


def _candidates() -> Iterator[tuple[Path, str]]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(name):
            yield Path(value), name
    if nvcc := shutil.which("nvcc"):
        # The folder that nvcc itself works from: what is on PATH may be a script that calls it.
        dry = subprocess.run(
            [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
        ).stderr
        top = re.search(r"^#\$ TOP=(.+)$", dry, re.MULTILINE)
        yield (Path(top[1].strip()) if top else Path(nvcc).resolve().parent.parent), "nvcc on PATH"
    yield from ((path, str(path)) for path in sorted(Path("/usr/local").glob("cuda*")))


def installed_toolkit(release: str) -> tuple[Toolkit | None, list[str]]:
    """A complete toolkit of this release on the machine, and why others were passed over."""
    passed: list[str] = []
    seen: set[Path] = set()
    for candidate, origin in _candidates():
        root = candidate.resolve()
        if root in seen or not (root / "bin/nvcc").exists():
            continue
        seen.add(root)
        version = _nvcc_version(root / "bin/nvcc")
        if version is None or version[0] != release:
            passed.append(f"{root} ({origin}) is CUDA {version[0] if version else 'of an unknown release'}")
            continue
        include = root / "include"
        if not (include / "cuda_runtime.h").is_file() or not any(
            (include / p).is_dir() for p in ("cccl/cuda/std", "cuda/std")
        ):
            passed.append(f"{root} ({origin}) lacks cuda_runtime.h or libcu++")
            continue
        return Toolkit(
            root / "bin/nvcc", *version, (include,), f"{root}, from {origin}", _takes_seed(root / "bin/nvcc")
        ), passed
    return None, passed


def _shared_folder(target: Target, shared: Path) -> Path:
    """Where the toolkit of an index lies, or would; named by what it is made of."""
    if target.assembled:
        digest = hashlib.sha256(target.assembled.model_dump_json().encode()).hexdigest()
        return shared / f"{target.toolkit}-{digest[:16]}-with-lib"
    return shared / "-".join((str(target.toolkit), *TOOLKIT_PARTS))


def _install_from_index(target: Target, folder: Path, log: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as temporary:
        place = Path(temporary) / "site"
        command = pip.installing(
            sys.executable, "--target", place, f"cuda-toolkit[{','.join(TOOLKIT_PARTS)}]=={target.toolkit}"
        )
        hint = (
            "Install CUDA "
            + target.cuda
            + " and set CUDA_HOME, or check the network and pip's configuration."
        )
        run(command, error=ToolchainError, what=f"could not install CUDA {target.cuda}", hint=hint, log=log)
        place.replace(folder)


def toolkit(target: Target, shared: Path, logs: Path) -> Toolkit:
    """The machine's toolkit when it fits the target, else one from the package index or Debian.

    That one lies in a folder that every clone shares.

    Its path goes into the compile cache's keys, so a clone with a toolkit of its own would find nothing that
    another compiled.
    """
    installed, passed = installed_toolkit(target.cuda)
    if installed:
        return installed
    reason = "; ".join(passed) or "the machine has none"
    if target.toolkit is None:
        raise ToolchainError(
            f"target {target.name} needs CUDA {target.cuda}, whose compiler no index has ({reason}). "
            "Install it and set CUDA_HOME, or build in a container (--containers)."
        )
    folder = _shared_folder(target, shared)
    origin = (
        f"{target.toolkit} from Debian and the package index"
        if target.assembled
        else f"cuda-toolkit {target.toolkit} from the package index"
    )
    with files.in_turn(shared / "lock", "installs a CUDA toolkit"):
        if not folder.is_dir():
            console.step(f"Installing {origin} ({reason})")
            if target.assembled:
                debian.assemble(target.assembled, folder, logs / "cuda-toolkit.log")
            else:
                _install_from_index(target, folder, logs / "cuda-toolkit.log")
    if (kept := _kept(target, folder, f"{origin} ({reason}), in {folder}")) is None:
        raise ToolchainError(
            f"CUDA {origin} has no nvcc {target.cuda}; is {folder} damaged? Delete it and build again."
        )
    return kept


def _kept(target: Target, folder: Path, why: str) -> Toolkit | None:
    """The toolkit in a folder that every clone shares; None where it is none of the target's release."""
    root = folder if target.assembled else folder / "nvidia" / f"cu{target.cuda.partition('.')[0]}"
    nvcc = root / "bin/nvcc"
    version = _nvcc_version(nvcc)
    if version is None or version[0] != target.cuda:
        return None
    return Toolkit(nvcc, *version, (root / "include",), why, _takes_seed(nvcc))


def there(target: Target) -> Toolkit | None:
    """The toolkit that a build would take; None where one would be installed, or none can be had."""
    installed = installed_toolkit(target.cuda)[0]
    if installed is not None or target.toolkit is None:
        return installed
    folder = _shared_folder(target, layout.cache("toolkit"))
    return _kept(target, folder, f"kept in {folder}")


def host_compiler() -> Path:
    """The C++ compiler: CXX, or g++."""
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise ToolchainError(
            f"no C++ compiler: {name} is not on PATH. Install g++ (Debian, Ubuntu: "
            "apt install g++), or set CXX."
        )
    return Path(compiler)


def _host_version(cxx: Path) -> str:
    return run([cxx, "--version"], error=ToolchainError, what=f"{cxx} does not work").partition("\n")[0]


def tool(name: str) -> Path:
    """A program that came with this package's dependencies."""
    beside = Path(sys.executable).with_name(name)
    program = beside if beside.exists() else shutil.which(name)
    if program is None:
        raise ToolchainError(
            f"{name} is not installed beside {sys.executable}; run this through nox, which installs it."
        )
    return Path(program)


def assemble(target: Target, python_version: str | None, build: Path, *, cache: bool) -> Toolchain:
    """Everything that a build of this target needs; with a Python, torch for it too."""
    cxx = host_compiler()
    logs = build / "logs"
    interpreter = find_python(python_version) if python_version is not None else None
    tools = toolkit(
        target, layout.cache("toolkit"), logs
    )  # before torch: a target that cannot be built should not cost gigabytes
    env = None
    if python_version is not None and interpreter is not None:
        env = torch_environment.environment(target, interpreter, python_version, build / "env", logs)
        torch_environment.check_headers(env)
    return Toolchain(
        *(tools, cxx, _host_version(cxx), tool("ninja"), tool("sccache") if cache else None, env),
        tvm_ffi.installed(layout.cache("tvm-ffi"), logs / "tvm-ffi.log"),
    )


def out_of_reach(target: Target) -> bool:
    """Whether a target's CUDA is neither on the machine nor to be had from an index."""
    return target.toolkit is None and installed_toolkit(target.cuda)[0] is None


def present(target: Target, build: Path) -> Toolchain | None:
    """What compiles a target's kernels, where nothing need be installed for that."""
    if there(target) is None:
        return None
    return assemble(target, None, build, cache=True)

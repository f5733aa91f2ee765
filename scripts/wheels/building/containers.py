"""Build wheels in containers through cibuildwheel.

Each container makes one wheel, which is repaired, audited, and imported by several Pythons.

The container gets the files that git tracks, or would, and nothing else. Kernels, binding and packing are the
same commands as outside. Compile cache, sdists and pip's downloads are kept between containers.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tomlkit

from scripts.base import console, files, layout
from scripts.base.errors import ToolchainError, WheelError
from scripts.base.git import Repository
from scripts.base.process import quoted
from scripts.wheels.building.engine import Engine, find_engine, podman
from scripts.wheels.packing import wheel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.source.matrix import Target

LOCAL_IMAGE = "localhost/flash-attention-deterministic"
_BACKEND = "backend.py"
_PACKAGE = "package"
_CACHE = "/root/.cache"  # inside; one folder of the user's for all containers, as they write as root
_ENVIRONMENT = (
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_CERT",
    "PIP_DEFAULT_TIMEOUT",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "SCCACHE_CACHE_SIZE",
)
# Loaded by torch and apache-tvm-ffi before us.
ELSEWHERE = ("libtvm_ffi.so", "libcudart.so.*", "libcuda.so.*")
TRIED = ("3.10", "3.12", "3.14")  # the Pythons that import a container's wheel


@dataclass(frozen=True)
class Request:
    """What one container builds."""

    target: Target
    options: tuple[str, ...]  # of the build command inside
    image: str


# --- what goes into the container ---


def stage(root: Path, folder: Path) -> Path:
    """The project that cibuildwheel copies.

    It has what git tracks or would, and a package whose build backend runs our build.
    """
    shutil.rmtree(folder, ignore_errors=True)
    repository = Repository(root, WheelError)
    for name in repository.run(
        "ls-files", "-z", "--cached", "--others", "--exclude-standard", writes=False
    ).split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    project = tomlkit.parse((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package = folder / _PACKAGE
    package.mkdir()
    shutil.copy2(Path(__file__).with_name("pep517.py"), package / _BACKEND)
    described = tomlkit.document()
    described["build-system"] = {
        "requires": list(project["dependencies"]),
        "build-backend": "backend",
        "backend-path": ["."],
    }
    # cibuildwheel reads it to see which Pythons to build for; the wheel has metadata of its own.
    described["project"] = {
        "name": "flash-attn",
        "version": "0",
        "requires-python": f">={TRIED[0]}",
    }
    files.write(package / "pyproject.toml", tomlkit.dumps(described))
    return package


def _before_all(request: Request, requirements: Sequence[str]) -> str:
    """What a container runs first: it makes an environment of our build system, and compiles the kernels."""
    inside = "/opt/python/cp{0}-cp{0}/bin/python".format(TRIED[0].replace(".", ""))
    python = "/opt/kernels/bin/python"
    once = ["--kernels-only"]
    uv = (
        f"{inside} -m pip install --quiet uv && ln -s $(dirname $(readlink -f {inside}))/uv /usr/local/bin/uv"
    )
    return " && ".join(
        [
            f"{{ command -v uv || {{ {uv}; }}; }}",
            f"{inside} -m venv /opt/kernels",
            f"{python} -m pip install --quiet {quoted(requirements)}",
            f"cd {{project}} && {quoted([python, '-m', 'scripts', 'build', *once, *request.options])}",
        ]
    )


def configuration(request: Request, engine: Engine, requirements: Sequence[str], python: str) -> str:
    """Cibuildwheel's settings for one container.

    Args:
        request: what it builds.
        engine: what runs it.
        requirements: of our build system, for the kernels' environment inside.
        python: this process's interpreter, which audits on the host.
    """
    excluded = " ".join(f"--exclude {shlex.quote(name)}" for name in ELSEWHERE)
    settings = tomlkit.document()
    settings["tool"] = {
        "cibuildwheel": {
            # The first builds; the others find its wheel fitting, and import it.
            "build": [f"cp{p.replace('.', '')}-manylinux_x86_64" for p in TRIED],
            "archs": ["x86_64"],
            "container-engine": {
                "name": engine.name,
                "disable-host-mount": True,
                "create-args": [f"--volume={layout.cache('containers')}:{_CACHE}"],
            },
            "manylinux-x86_64-image": request.image,
            "environment": {"FORK_BUILD": quoted(request.options), "XDG_CACHE_HOME": _CACHE},
            "environment-pass": list(_ENVIRONMENT),
            # Isolates by a virtual environment, where pip sets variables that reach torch's own; and with uv
            # the audit's environment on the host is made by it too, without a download from a place that may
            # be out of reach.
            "build-frontend": "build[uv]",
            "before-all": _before_all(request, requirements),
            "repair-wheel-command": f"auditwheel repair {excluded} -w {{dest_dir}} {{wheel}}",
            "audit-requires": [],
            "audit-command": f"{quoted([python])} -m scripts audit {{wheel}}",
            # dlopen resolves every symbol: a wheel that imports beside its torch lacks none.
            "test-command": 'python -c "import flash_attn; flash_attn.fork_info()"',
        }
    }
    return tomlkit.dumps(settings)


# --- running ---

# A job in the background may be deaf to Ctrl-C, and it is by this that cibuildwheel takes its container away.
_CIBUILDWHEEL = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('cibuildwheel', run_name='__main__', alter_sys=True)"
)


def _show(command: Sequence[str], cwd: Path, environment: dict[str, str], log: Path) -> int:
    """Run a command in a session of its own, show and log what it says; its exit status.

    It is interrupted once when we are.
    """
    with (
        log.open("w", encoding="utf-8") as record,
        subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                record.write(line)
                console.note(line.rstrip("\n"))
            return process.wait()
        finally:
            if process.poll() is None:
                console.warn("stopping the container")
                os.killpg(process.pid, signal.SIGINT)
                process.communicate()


def build(request: Request, root: Path, folder: Path, out: Path) -> list[Path]:
    """The wheels of one container, moved into ``out``.

    Raises:
        ToolchainError: no engine.
        WheelError: cibuildwheel failed; its output was shown, and is in the log.
    """
    if importlib.util.find_spec("cibuildwheel") is None:
        raise ToolchainError(
            "cibuildwheel is not installed: run this through nox, with a Python of 3.11 or later (nox -s "
            "build -- --containers)."
        )
    engine = find_engine(request.image, folder / "podman")
    work = folder / request.target.name
    package = stage(root, work / "project")
    project = tomlkit.parse((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    config, wheels, log = work / "cibuildwheel.toml", work / "wheels", work / "cibuildwheel.log"
    files.write(config, configuration(request, engine, requirements, sys.executable))
    layout.cache("containers").mkdir(parents=True, exist_ok=True)
    shutil.rmtree(wheels, ignore_errors=True)
    options = ["--platform", "linux", "--config-file", config, "--output-dir", wheels]
    command = [*engine.wrapper, sys.executable, "-c", _CIBUILDWHEEL, *options, package]
    if request.image.startswith("localhost/") and podman(engine, "image", "exists", request.image) != 0:
        raise ToolchainError(f"there is no image {request.image}; nox -s image makes {LOCAL_IMAGE}.")
    console.step(f"cibuildwheel, in {request.image} by {engine.name}; log: {log}")
    environment = {**os.environ, **engine.environment, "PYTHONPATH": str(root), "NO_COLOR": "1"}
    status = _show([str(word) for word in command], package.parent, environment, log)
    if status != 0:
        raise WheelError(
            f"cibuildwheel exited with {status}; the last lines above say why, the whole log is {log}."
        )
    made = [_publish(path, out) for path in sorted(wheels.glob("*.whl"))]
    shutil.rmtree(work / "project")
    return made


def _publish(made: Path, out: Path) -> Path:
    """Copy a wheel into ``out``, whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    part = out / f".{made.name}.part"
    shutil.copyfile(made, part)
    wheel.publish(part, out / made.name)
    return out / made.name

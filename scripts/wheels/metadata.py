"""What a wheel says of itself: upstream's metadata with ours, and the provenance."""

from __future__ import annotations

import shutil
import tempfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.base import files
from scripts.base.errors import WheelError
from scripts.base.process import run
from scripts.wheels.kernels import nvcc_flags

if TYPE_CHECKING:
    from scripts.series.model import Series
    from scripts.series.tree import Tree
    from scripts.source.matrix import Matrix, Target
    from scripts.wheels.kernels import Plan
    from scripts.wheels.toolchain import Toolchain

PROVENANCE = "flash_attn/_fork.json"


PROVENANCE_FORMAT = 1


_SAID = ("PKG-INFO", "SOURCES.txt")  # what is kept of setup.py's answer


def upstream_metadata(tree: Tree, toolchain: Toolchain, build: Path) -> Message:
    """Upstream's metadata, as its own setup.py gives it."""
    return Parser().parsestr(_said(tree, toolchain, build)["PKG-INFO"])


def upstream_files(tree: Tree, toolchain: Toolchain, build: Path) -> list[str]:
    """The Python files of the packages that upstream's setup.py packs."""
    listed = _said(tree, toolchain, build)["SOURCES.txt"].splitlines()
    return [name for name in listed if name.startswith("flash_attn/") and name.endswith(".py")]


def _said(tree: Tree, toolchain: Toolchain, build: Path) -> dict[str, str]:
    """What setup.py says; kept, because that takes some seconds."""
    kept = build / "metadata" / f"{tree.commit}-{toolchain.environment.tag}.egg-info"
    if not all((kept / name).is_file() for name in _SAID):
        kept.mkdir(parents=True, exist_ok=True)
        said = _ask_setup(tree, toolchain, build / "logs" / "metadata.log")
        tree.check_unchanged()
        for name, text in said.items():
            files.write(kept / name, text)
    return {name: (kept / name).read_text(encoding="utf-8") for name in _SAID}


def _ask_setup(tree: Tree, toolchain: Toolchain, log: Path) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        shutil.copytree(tree.root, source, ignore=shutil.ignore_patterns(".git", "cutlass"))
        # setup.py looks for cutlass before it knows that nothing is to be compiled.
        header = source / "csrc/cutlass/include/cutlass/cutlass.h"
        header.parent.mkdir(parents=True)
        header.touch()
        env = {
            "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE",
            "FLASH_ATTENTION_FORCE_BUILD": "TRUE",
            "CUDA_HOME": "",
        }
        command: list[str | Path] = [
            toolchain.environment.python,
            "setup.py",
            "--quiet",
            "egg_info",
            "--egg-base",
            folder,
        ]
        run(
            command,
            error=WheelError,
            what="upstream's setup.py gave no metadata",
            hint="Does a patch touch setup.py?",
            cwd=source,
            env=env,
            log=log,
        )
        answer = Path(folder) / "flash_attn.egg-info"
        return {name: (answer / name).read_text(encoding="utf-8") for name in _SAID}


def fork_metadata(upstream: Message, matrix: Matrix, target: Target, python: str) -> str:
    """Upstream's metadata with our version, NOTICE, and the Python and the torch that it is built for."""
    requires = [
        f"torch=={'.'.join(target.torch.split('.')[:2])}.*" if r == "torch" else r
        for r in upstream.get_all("Requires-Dist", [])
    ]
    if f"torch=={'.'.join(target.torch.split('.')[:2])}.*" not in requires:
        raise WheelError(f"upstream's metadata does not require torch as expected: {requires}.")
    message = Message()
    for name, value in upstream.items():
        if name in (
            "Version",
            "Requires-Dist",
            "License-File",
            "Requires-Python",
            "Dynamic",
            "Metadata-Version",
        ):
            continue
        message[name] = value
    message["Metadata-Version"] = "2.4"
    message["Version"] = matrix.version(target)
    message["Requires-Python"] = f"=={python}.*"
    for requirement in requires:
        message["Requires-Dist"] = requirement
    for name in ("LICENSE", "AUTHORS", "NOTICE"):
        message["License-File"] = name
    message.set_payload(upstream.get_payload())
    # Metadata-Version comes first; email keeps the order in which headers were set.
    ordered = Message()
    for name in ("Metadata-Version", "Name", "Version"):
        ordered[name] = message[name]
    for name, value in message.items():
        if name not in ("Metadata-Version", "Name", "Version"):
            ordered[name] = value
    ordered.set_payload(message.get_payload())
    return ordered.as_string(maxheaderlen=0)


def version_facts(matrix: Matrix) -> dict[str, str]:
    """What a provenance says of a wheel that passes for another release than it was built from."""
    return {"base_version": matrix.base_version} if matrix.base_version else {}


def series_facts(series: Series, tree: Tree) -> dict[str, Any]:
    """What a provenance says of the series."""
    return {
        "digest": tree.digest,
        "base": tree.base,
        "commit": tree.commit,
        "patches": [{"name": p.name, "subject": p.subject, "sha256": p.sha256} for p in series.patches],
    }


def provenance(matrix: Matrix, target: Target, series: Series, plan: Plan) -> dict[str, Any]:
    """What ``flash_attn/_fork.json`` holds and ``fork_info()`` returns."""
    pin, tree = matrix.upstream, plan.tree
    return {
        "format": PROVENANCE_FORMAT,
        "upstream": {
            "version": pin.version,
            "commit": pin.commit,
            "cutlass": pin.cutlass,
            "sdist_sha256": pin.sdist_sha256,
        },
        **version_facts(matrix),
        "fork_revision": matrix.table.revision,
        "series": series_facts(series, tree),
        "target": target.name,
        "kernel_set": [k.name for k in plan.kernels],
        "attn_bias": all(k.bias for k in plan.kernels),
        "architectures": list(plan.architectures),
        "cuda": target.cuda,
        "torch": target.torch,
        "nvcc": {"version": plan.toolchain.toolkit.version, "flags": nvcc_flags(plan)},
    }

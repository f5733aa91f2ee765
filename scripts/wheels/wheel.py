"""Link the extension and pack it with upstream's Python files, metadata and provenance into one wheel.

Packing adds nothing of its own to the objects: entries in order, one date for all of them.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import tempfile
import zipfile
from contextlib import contextmanager
from datetime import datetime, timezone
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from wheel.wheelfile import WheelFile

from scripts.base import files
from scripts.base.errors import WheelError
from scripts.base.process import run
from scripts.source.kernel_set import spell_kernels
from scripts.wheels.kernels import FORK, HIDDEN_OPTIONS, nvcc_flags

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scripts.series.model import Series
    from scripts.series.tree import Tree
    from scripts.source.matrix import Matrix, Target
    from scripts.wheels.kernels import Plan
    from scripts.wheels.toolchain import Toolchain

PROVENANCE = "flash_attn/_fork.json"
PROVENANCE_FORMAT = 1
_DATE = (2025, 1, 1, 0, 0, 0)  # of every entry, as in the series' commits
# What torch loads before us, and what manylinux counts on.
_PRESENT = re.compile(
    r"lib(torch|c10)\w*\.so|libcudart\.so\.\d+|lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so\.\d+|ld-linux-x86-64\.so\.2"
)
_TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python", "c10_cuda", "torch_cuda")


@contextmanager
def _source_date() -> Iterator[None]:
    """The date of RECORD, which the wheel library writes itself, from the variable that it honours."""
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = str(int(datetime(*_DATE, tzinfo=timezone.utc).timestamp()))
    try:
        yield
    finally:
        if before is None:
            del os.environ["SOURCE_DATE_EPOCH"]
        else:
            os.environ["SOURCE_DATE_EPOCH"] = before


def needed(library: Path) -> tuple[str, ...]:
    """The shared libraries that an ELF file asks the loader for (its ``DT_NEEDED``)."""
    with library.open("rb") as stream:
        dynamic = ELFFile(stream).get_section_by_name(".dynamic")
        if not isinstance(dynamic, DynamicSection):
            return ()
        return tuple(tag.needed for tag in dynamic.iter_tags("DT_NEEDED"))  # type: ignore[attr-defined]  # set by the tag's kind


def audit(path: Path) -> tuple[str, ...]:
    """The shared libraries that a wheel's extensions need beside torch's and the system's.

    Raises:
        WheelError: one that its users may not have, or that was packed into the wheel and would be there twice.
    """
    found: set[str] = set()
    try:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
            names = [name for name in archive.namelist() if re.search(r"\.so(\.\d+)*$", name)]
            for name in names:
                found.update(needed(Path(archive.extract(name, folder))))
    except (zipfile.BadZipFile, ELFError) as e:
        raise WheelError(f"{path} is damaged, or no wheel ({e}); build it again.") from e
    foreign = sorted(name for name in found if not _PRESENT.fullmatch(name))
    inside = [name for name in names if "flash_attn.libs/" in name]
    if foreign or inside or not names:
        problems = [
            *(f"needs {name}" for name in foreign),
            *(f"contains {name}" for name in inside),
            *([] if names else ["has no extension"]),
        ]
        raise WheelError(
            f"{path.name} {', '.join(problems)}; a wheel may need torch, its CUDA runtime and the system's C and C++ libraries alone."
        )
    return tuple(sorted(found))


def link_options(toolchain: Toolchain) -> list[str]:
    """What the linker is told beside objects and folders: stripped, and the CUDA runtime by the name that torch loads, so that a process has one."""
    major = toolchain.toolkit.release.partition(".")[0]
    return ["-shared", "-s", *(f"-l{name}" for name in _TORCH_LIBRARIES), f"-l:libcudart.so.{major}"]


def link(toolchain: Toolchain, objects: Sequence[Path], target: Path, log: Path) -> None:
    """Link kernels and binding into the extension, stripped; one run at a time in a clone, and once."""
    with files.in_turn(log.with_suffix(".lock"), "links in this clone"):
        if not target.exists():
            _link(toolchain, objects, target, log)


def _link(toolchain: Toolchain, objects: Sequence[Path], target: Path, log: Path) -> None:
    env = toolchain.environment
    folders = [
        env.site / "torch/lib",
        *(folder / "lib" for folder in env.cuda),
        toolchain.toolkit.nvcc.parent.parent / "lib64",
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".part")
    command: list[str | Path] = [
        toolchain.cxx,
        "-o",
        aside,
        *objects,
        *(f"-L{folder}" for folder in folders),
        *link_options(toolchain),
    ]
    run(
        command,
        error=WheelError,
        what="could not link the extension",
        hint="Objects of a damaged disk or another compiler? Delete build/kernels and build again.",
        log=log,
        without=HIDDEN_OPTIONS,
    )
    if not any(name.startswith("libstdc++.so") for name in needed(aside)):
        aside.unlink()
        raise WheelError(
            f"{toolchain.cxx} linked libstdc++ into the extension; torch brings another, and the first C++ error that crosses between the two crashes "
            "the process. Install the compiler's shared library (Debian: g++), or set CXX to a compiler that links libstdc++.so.6."
        )
    aside.replace(target)


def _metadata(tree: Tree, toolchain: Toolchain, build: Path) -> Message:
    """Upstream's metadata, as its own setup.py gives it; kept, because that takes some seconds."""
    kept = build / "metadata" / f"{tree.commit}-{toolchain.environment.tag}"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        text = _ask_setup(tree, toolchain, build / "logs" / "metadata.log")
        tree.check_unchanged()
        files.write(kept, text)
    return Parser().parsestr(kept.read_text(encoding="utf-8"))


def _ask_setup(tree: Tree, toolchain: Toolchain, log: Path) -> str:
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
        return (Path(folder) / "flash_attn.egg-info/PKG-INFO").read_text(encoding="utf-8")


def _fork_metadata(upstream: Message, matrix: Matrix, target: Target, python: str) -> str:
    """Upstream's metadata with our version, the Python and the torch that the extension is built for, and NOTICE."""
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
        "fork_revision": matrix.fork.revision,
        "series": {
            "digest": tree.digest,
            "base": tree.base,
            "commit": tree.commit,
            "patches": [{"name": p.name, "subject": p.subject, "sha256": p.sha256} for p in series.patches],
        },
        "target": target.name,
        "kernel_set": [k.name for k in plan.kernels],
        "attn_bias": all(k.bias for k in plan.kernels),
        "architectures": list(plan.architectures),
        "cuda": target.cuda,
        "torch": target.torch,
        "nvcc": {"version": plan.toolchain.toolkit.version, "flags": nvcc_flags(plan)},
    }


def _build_tag(plan: Plan) -> str:
    """What tells wheels of one version apart: kernels and architectures. It starts with a number, and installers prefer the larger."""
    words = [*spell_kernels(plan.kernels), *(f"sm{a}" for a in plan.architectures)]
    return f"{len(plan.kernels) * len(plan.architectures)}_{'_'.join(words).replace('-', '')}"  # a dash ends a tag


def pack(
    matrix: Matrix,
    target: Target,
    plan: Plan,
    extension: Path,
    facts: dict[str, Any],
    *,
    notice: Path,
    dist: Path,
) -> Path:
    """Write the wheel into ``dist``, aside and then renamed."""
    tree, tag = plan.tree, plan.toolchain.environment.tag
    version = matrix.version(target)
    info = f"flash_attn-{version}.dist-info"
    build_tag = _build_tag(plan)
    name = f"flash_attn-{version}-{build_tag}-{tag}-{tag}-linux_x86_64.whl"
    metadata = _fork_metadata(
        _metadata(tree, plan.toolchain, plan.build), matrix, target, f"{tag[2]}.{tag[3:]}"
    )
    wheel = f"Wheel-Version: 1.0\nGenerator: flash-attention-deterministic\nRoot-Is-Purelib: false\nBuild: {build_tag}\nTag: {tag}-{tag}-linux_x86_64\n"
    entries: dict[str, bytes] = {
        p.relative_to(tree.root).as_posix(): p.read_bytes() for p in (tree.root / "flash_attn").rglob("*.py")
    }
    entries |= {
        PROVENANCE: (json.dumps(facts, indent=1) + "\n").encode(),
        f"{FORK.extension}.cpython-{tag[2:]}-x86_64-linux-gnu.so": extension.read_bytes(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": wheel.encode(),
        f"{info}/top_level.txt": f"flash_attn\n{FORK.extension}\n".encode(),
        f"{info}/licenses/LICENSE": (tree.root / "LICENSE").read_bytes(),
        f"{info}/licenses/AUTHORS": (tree.root / "AUTHORS").read_bytes(),
        f"{info}/licenses/NOTICE": notice.read_bytes(),
    }
    tree.check_unchanged()
    dist.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dist, prefix=".") as folder, _source_date():
        aside = Path(folder) / name
        with WheelFile(aside, "w", zipfile.ZIP_DEFLATED) as archive:
            # Metadata last, as the binary distribution format recommends.
            for entry in sorted(entries, key=lambda e: (".dist-info/" in e, e)):
                header = zipfile.ZipInfo(entry, _DATE)
                header.external_attr = (0o100755 if entry.endswith(".so") else 0o100644) << 16
                header.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(header, entries[entry])
        publish(aside, dist / name)
    return dist / name


def publish(aside: Path, place: Path) -> None:
    """Rename a wheel into its place. The proof that lies there goes, unless it is of these bytes."""
    if not (place.is_file() and filecmp.cmp(aside, place, shallow=False)):
        proof_path(place).unlink(missing_ok=True)
    aside.replace(place)


def proof_path(wheel: Path) -> Path:
    """Where a wheel's proof lies: beside it."""
    return wheel.with_suffix(".proof.json")

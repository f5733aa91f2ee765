"""Pack what was linked with the tree's Python files, metadata and provenance into one wheel.

Packing adds nothing of its own to the objects: entries in order, one date for all of them.
"""

from __future__ import annotations

import filecmp
import os
import re
import tempfile
import zipfile
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wheel.wheelfile import WheelFile

from scripts.base import layout
from scripts.source.kernel_set import spell_kernels
from scripts.wheels.compiling.kernels import FORK
from scripts.wheels.packing import cpp_package, linking
from scripts.wheels.packing.metadata import PROVENANCE, entry_points, fork_metadata, python_files
from scripts.wheels.trust import binaries, companions, evidence, sbom

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from scripts.source.matrix import Matrix, Target
    from scripts.wheels.compiling.kernels import Plan

DATE = (2025, 1, 1, 0, 0, 0)  # of every entry, as in the series' commits


@contextmanager
def _source_date() -> Iterator[None]:
    """The date of RECORD, which the wheel library writes itself, from the variable that it honours."""
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = str(int(datetime(*DATE, tzinfo=timezone.utc).timestamp()))
    try:
        yield
    finally:
        if before is None:
            del os.environ["SOURCE_DATE_EPOCH"]
        else:
            os.environ["SOURCE_DATE_EPOCH"] = before


def build_tag(plan: Plan) -> str:
    """What tells wheels, and archives, of one version apart: kernels and architectures.

    It starts with a number, and installers prefer the larger.
    """
    words = [*spell_kernels(plan.kernels), *(f"sm{a}" for a in plan.architectures)]
    count = len(plan.kernels) * len(plan.architectures)
    return f"{count}_{'_'.join(words).replace('-', '')}"  # a dash ends a tag


def pack(
    matrix: Matrix,
    target: Target,
    plan: Plan,
    linked: Mapping[linking.Product, Path],
    facts: dict[str, Any],
    dist: Path,
) -> Path:
    """Write the wheel into ``dist``, aside and then renamed.

    Args:
        matrix: as the upstream sees it.
        target: whose wheel it is.
        plan: what was compiled.
        linked: the wheel's library and its binding.
        facts: what the wheel says of itself.
        dist: the folder.
    """
    tree, tag = plan.tree, f"py3-none-{binaries.platform(*linked.values())}"
    version = matrix.version(target)
    info = f"flash_attn-{version}.dist-info"
    choice = build_tag(plan)
    name = f"flash_attn-{version}-{choice}-{tag}.whl"
    metadata = fork_metadata(tree.root, matrix, target)
    wheel = "Wheel-Version: 1.0\nGenerator: flash-attention-deterministic\nRoot-Is-Purelib: false\n"
    wheel += f"Build: {choice}\nTag: {tag}\n"
    entries: dict[str, bytes] = {
        name: (tree.root / name).read_bytes() for name in python_files(tree.root, (FORK.extension,))
    }
    product = linking.Product.LIBRARY
    cpp = cpp_package.files(tree.root, linked[product], plan.toolchain, product)
    entries |= {f"{binaries.CPP}/{name}": content for name, content in cpp.items()}
    entries |= {
        f"{FORK.extension}/{binaries.EXTENSION}": linked[linking.Product.BINDING].read_bytes(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": wheel.encode(),
        f"{info}/top_level.txt": f"flash_attn\n{FORK.extension}\n".encode(),
        f"{info}/licenses/LICENSE": (tree.root / "LICENSE").read_bytes(),
        f"{info}/licenses/AUTHORS": (tree.root / "AUTHORS").read_bytes(),
        f"{info}/licenses/NOTICE": (layout.ROOT / "NOTICE").read_bytes(),
    }
    if points := entry_points(tree.root):
        entries[f"{info}/entry_points.txt"] = points.encode()
    tree.check_unchanged()
    return write(dist / name, sbom.describe(entries, info, PROVENANCE, facts))


def write(place: Path, entries: dict[str, bytes]) -> Path:
    """Write a wheel of these files, aside and then renamed: entries in order, and one date for all."""
    dist, name = place.parent, place.name
    dist.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dist, prefix=".") as folder, _source_date():
        part = Path(folder) / name
        with WheelFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            # Metadata last, as the binary distribution format recommends.
            for entry in sorted(entries, key=lambda e: (".dist-info/" in e, e)):
                header = zipfile.ZipInfo(entry, DATE)
                header.external_attr = (0o100755 if re.search(r"\.so(\.\d+)*$", entry) else 0o100644) << 16
                header.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(header, entries[entry])
        publish(part, place)
    evidence.attest_build(place)
    return place


def publish(part: Path, place: Path) -> None:
    """Rename a wheel into its place. What tells of other bytes there goes: proof, statements, signatures."""
    if not (place.is_file() and filecmp.cmp(part, place, shallow=False)):
        for stale in companions.of_bytes(place):
            stale.unlink(missing_ok=True)
    part.replace(place)

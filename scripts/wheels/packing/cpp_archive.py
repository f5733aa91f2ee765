"""The archive of the C++ API, for those without Python: one folder, which may lie anywhere.

The same inputs give the same bytes: entries in order, one date, one owner.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from scripts.base import layout, sealed
from scripts.base.errors import WheelError
from scripts.wheels.packing import cpp_package, linking
from scripts.wheels.packing.wheel import DATE, build_tag
from scripts.wheels.trust import binaries, sbom

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.series.tree import Tree
    from scripts.source.matrix import Matrix, Target
    from scripts.wheels.compiling.kernels import Plan

NAME = "flash_attention_v2"
_LINK = binaries.LIBRARY.rpartition(".")[0]  # libflash_attention_v2.so, which -lflash_attention_v2 finds
_LICENCES = f"share/licenses/{NAME}"
_ABOUT = f"share/{NAME}"
_PYTHONS = ("torch", "requires_torch", "tvm_ffi")  # what a wheel's provenance says of its binding


def file_name(matrix: Matrix, target: Target, plan: Plan) -> str:
    """Such as ``flash_attention_v2-2.8.3.post1+det.2-24_hdim64_hdim128_sm90-cu13-linux-x86_64.tar.gz``.

    As in a wheel's name, the words between tell archives of other kernels and GPUs apart.
    """
    return f"{NAME}-{matrix.version()}-{build_tag(plan)}-{target.label}-linux-x86_64.tar.gz"


def pack(
    matrix: Matrix, target: Target, plan: Plan, library: Path, facts: dict[str, Any], dist: Path
) -> Path:
    """Write the archive into ``dist``, aside and then renamed.

    Args:
        matrix: as the upstream sees it.
        target: whose archive it is.
        plan: what was compiled.
        library: with a CUDA runtime in it.
        facts: what a wheel of the plan says of itself, with the static libraries of this library.
        dist: the folder.

    Raises:
        SeriesError: the tree changed meanwhile.
        WheelError: the tree does not say what the archive has to say.
    """
    tree, name = plan.tree, file_name(matrix, target, plan)
    told = sealed.seal({key: value for key, value in facts.items() if key not in _PYTHONS})
    made = cpp_package.files(tree.root, library, plan.toolchain, linking.Product.ARCHIVED)
    made |= {f"{_LICENCES}/{of}": text for of, text in _licences(tree).items()}
    made |= {
        f"{_ABOUT}/_fork.json": sealed.render(told),
        f"{_ABOUT}/{NAME}.cdx.json": sbom.render(
            NAME,
            matrix.version(target),
            told,
            list(binaries.needed(library)),
            upstream=matrix.upstream.distribution,
        ),
    }
    tree.check_unchanged()
    return write(dist / name, name.removesuffix(".tar.gz"), made, {f"lib/{_LINK}": binaries.LIBRARY})


def _licences(tree: Tree) -> dict[str, bytes]:
    """The licences of all whose code the library holds."""
    header = tree.root / "csrc/cutlass/include/cutlass/cutlass.h"
    # The sdist has no licence file of CUTLASS, but each header begins with it.
    found = re.match(r"/\*+\n(.*?)\n? \*+/", header.read_text(encoding="utf-8"), re.DOTALL)
    if found is None or "Redistribution and use" not in found[1]:
        raise WheelError(f"{header} begins with CUTLASS's licence no more; where is it?")
    cutlass = re.sub(r"^ \* ?", "", found[1], flags=re.MULTILINE).strip() + "\n"
    return {
        "LICENSE": (tree.root / "LICENSE").read_bytes(),
        "AUTHORS": (tree.root / "AUTHORS").read_bytes(),
        "NOTICE": (layout.ROOT / "NOTICE").read_bytes(),
        "CUTLASS": cutlass.encode(),
        "CUDA-RUNTIME": (cpp_package.TEMPLATES / "CUDA-RUNTIME").read_bytes(),
    }


def write(place: Path, top: str, contents: dict[str, bytes], links: dict[str, str]) -> Path:
    """Write a gzipped archive of these files, aside and then renamed.

    Args:
        place: the archive.
        top: the folder in it that holds all.
        contents: of each file, by its name in that folder.
        links: where each symbolic link leads, by its name there.
    """
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted({*contents, *links}):
            entry = tarfile.TarInfo(f"{top}/{name}")
            entry.mtime = int(datetime(*DATE, tzinfo=timezone.utc).timestamp())
            if name in links:
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, links[name], 0o777
                archive.addfile(entry)
            else:
                entry.size = len(contents[name])
                entry.mode = 0o755 if ".so" in name else 0o644
                archive.addfile(entry, io.BytesIO(contents[name]))
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}.part")
    try:
        part.write_bytes(packed.getvalue())
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)
    return place

"""The wheel of a python upstream: its package with the patches, upstream's metadata, and the provenance.

Nothing is compiled, and nothing is installed: one wheel serves every Python, torch and GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tomlkit
from packaging.utils import canonicalize_name
from packaging.version import Version
from pyproject_metadata import ConfigurationError, StandardMetadata
from tomlkit.exceptions import TOMLKitError

from scripts.base import console, layout
from scripts.base.errors import WheelError
from scripts.series import clone, places
from scripts.wheels.packing import wheel
from scripts.wheels.packing.metadata import PROVENANCE_FORMAT, series_facts, version_facts
from scripts.wheels.trust import sbom

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.series.model import Series
    from scripts.series.tree import Tree
    from scripts.source.matrix import Matrix
    from scripts.source.upstream import Source

TAG = "py3-none-any"


def build(loaded: Matrix, source: Source, build_folder: Path, out: Path) -> Path:
    """Apply the series and pack the wheel; its path."""
    root = build_folder / places.of(loaded).source.name
    patches, applied = clone.apply(loaded, source, root)
    console.step(f"Packing {loaded.upstream.distribution} {loaded.version()}")
    return pack(loaded, patches, applied, out)


def file_name(loaded: Matrix) -> str:
    """Of the wheel, such as ``flash_attn_4-4.0.0b36+det.1-py3-none-any.whl``."""
    return f"{_stem(loaded)}-{TAG}.whl"


def _stem(loaded: Matrix) -> str:
    distribution = canonicalize_name(loaded.upstream.distribution).replace("-", "_")
    return f"{distribution}-{loaded.version()}"


def provenance_path(package: str) -> str:
    """Where a wheel's provenance lies: in its package."""
    return f"{package}/_fork.json"


def pack(loaded: Matrix, patches: Series, tree: Tree, dist: Path) -> Path:
    """Write the wheel into ``dist``, aside and then renamed.

    The package alone goes in: above it lies a namespace, which belongs to no wheel alone.
    """
    package = str(loaded.upstream.package)
    folder, info = tree.root / package, f"{_stem(loaded)}.dist-info"
    about = (
        f"Wheel-Version: 1.0\nGenerator: flash-attention-deterministic\nRoot-Is-Purelib: true\nTag: {TAG}\n"
    )
    entries = {f"{package}/{path.name}": path.read_bytes() for path in folder.glob("*.py")}
    licences = {name: folder / name for name in ("LICENSE", "AUTHORS") if (folder / name).is_file()}
    licences["NOTICE"] = layout.ROOT / "NOTICE"
    entries |= {
        f"{info}/METADATA": metadata(loaded, folder, list(licences)).encode(),
        f"{info}/WHEEL": about.encode(),
        f"{info}/top_level.txt": f"{package.partition('/')[0]}\n".encode(),
    }
    entries |= {f"{info}/licenses/{name}": path.read_bytes() for name, path in licences.items()}
    tree.check_unchanged()
    facts = provenance(loaded, patches, tree)
    described = sbom.describe(entries, info, provenance_path(package), facts)
    return wheel.write(dist / file_name(loaded), described)


def metadata(loaded: Matrix, folder: Path, licences: list[str]) -> str:
    """What upstream's pyproject.toml says, with our version and the licence files.

    Raises:
        WheelError: it cannot be read.
    """
    path = folder / "pyproject.toml"
    try:
        described = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
        told = StandardMetadata.from_pyproject(described, project_dir=folder)
    except (OSError, TOMLKitError, ConfigurationError) as e:
        raise WheelError(f"{path}: {e}. Does a patch touch it?") from e
    if canonicalize_name(told.name) != canonicalize_name(loaded.upstream.distribution):
        raise WheelError(f"{path}: describes {told.name}, not {loaded.upstream.distribution}.")
    told.version = Version(loaded.version())
    told.dynamic = []
    message = told.as_rfc822()
    del message["Metadata-Version"]
    lines = "".join(f"License-File: {name}\n" for name in licences)
    # The first that has License-File. It comes first, and what is told of files before the description.
    head, _, description = str(message).partition("\n\n")
    return f"Metadata-Version: 2.4\n{head}\n{lines}\n{description}"


def provenance(loaded: Matrix, patches: Series, tree: Tree) -> dict[str, Any]:
    """What the wheel's ``_fork.json`` holds and ``fork_info()`` returns."""
    pin = loaded.upstream
    return {
        "format": PROVENANCE_FORMAT,
        "upstream": {"version": pin.version, "commit": pin.commit, "sdist_sha256": pin.sdist_sha256},
        **version_facts(loaded),
        "fork_revision": loaded.table.revision,
        "series": series_facts(patches, tree),
    }

"""Wheel variants: copies of wheels whose name and content say which GPUs and drivers they are for.

By drafts, PEP 825 (format) and PEP 850 (providers): such a wheel has a label at the end of its name and a
``variant.json``; the index has one ``NAME-VERSION-variants.json`` for all of a version. Installers that do
not know variants pass over both.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from scripts.base.fetch import sha256
from scripts.wheels.trust import contents

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from scripts.wheels.index.indexed_wheel import IndexedWheel

SCHEMA = "https://variants-schema.wheelnext.dev/peps/850/v0.2.0.json"
# Who says what a machine has: a package of NVIDIA's, which uv has in itself.
_PROVIDERS = {
    "nvidia": {
        "requires": ["nvidia-variant-provider>=0.0.1,<1.0.0"],
        "plugin-api": "nvidia_variant_provider.plugin:NvidiaVariantPlugin",
    }
}

Properties = dict[str, dict[str, list[str]]]


@dataclass(frozen=True)
class Variant:
    """A copy of a wheel with a label."""

    path: Path
    wheel: IndexedWheel
    label: str
    sha256: str


def label(wheel: IndexedWheel) -> str:
    """CUDA's major version and the architectures, such as ``cu13_sm90``; empty: it serves any."""
    if not (wheel.facts.cuda and wheel.facts.architectures):
        return ""
    return "_".join([f"cu{wheel.facts.cuda_major}", *(f"sm{each}" for each in wheel.facts.architectures)])


def properties(wheel: IndexedWheel) -> Properties:
    """What the label stands for: the driver serves the CUDA's major version, and a GPU runs its machine code.

    Any driver of a major version serves all its releases, for wheels have no PTX.
    """
    return {
        "nvidia": {
            "cuda_version_lower_bound": [f"{wheel.facts.cuda_major}.0"],
            "sm_arch": sorted(f"{each}_real" for each in wheel.facts.architectures),
        }
    }


def document(variants: dict[str, Properties]) -> bytes:
    """The content of a ``variant.json``, or of a version's ``-variants.json``."""
    told: dict[str, Any] = {
        "$schema": SCHEMA,
        "default-priorities": {"namespace": ["nvidia"]},
        "providers": _PROVIDERS,
        "variants": dict(sorted(variants.items())),
    }
    return (json.dumps(told, indent=1) + "\n").encode()


def pack(wheel: IndexedWheel, folder: Path) -> Variant | None:
    """Write a wheel's copy with its label into a folder; nothing for a wheel that serves any machine."""
    named = label(wheel)
    if not named:
        return None
    path = folder / f"{wheel.path.stem}-{named}.whl"
    _copy(wheel.path, path, document({named: properties(wheel)}))
    return Variant(path, wheel, named, sha256(path))


def _copy(original: Path, path: Path, told: bytes) -> None:
    """The wheel with a ``variant.json`` before its RECORD, which has a row more. Dates stay as they were."""
    with zipfile.ZipFile(original) as archive, zipfile.ZipFile(path, "w") as copy:
        for entry in archive.infolist():
            content = archive.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                name = entry.filename.replace("RECORD", "variant.json")
                header = zipfile.ZipInfo(name, entry.date_time)
                header.external_attr, header.compress_type = entry.external_attr, entry.compress_type
                copy.writestr(header, told)
                content = f"{','.join(contents.record_row(name, told))}\n".encode() + content
            copy.writestr(entry, content)


def write_listings(variants: Iterable[Variant], folder: Path) -> dict[str, list[Path]]:
    """Write the document of each version; their paths by distribution."""
    listings: dict[str, list[Path]] = {}

    def release(each: Variant) -> tuple[str, str]:
        return each.wheel.name, "-".join(each.path.name.split("-")[:2])

    for (name, begin), group in groupby(sorted(variants, key=release), key=release):
        path = folder / f"{begin}-variants.json"
        path.write_bytes(document({each.label: properties(each.wheel) for each in group}))
        listings.setdefault(name, []).append(path)
    return listings

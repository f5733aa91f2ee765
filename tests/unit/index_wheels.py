"""Small wheels that say of themselves what ours do, for the tests of the index."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.base import sealed
from scripts.wheels.trust import companions, contents, sbom
from tests.unit.conftest import FACTS

CUDA: Any = {
    "name": "flash_attn",
    "version": "2.8.3.post1+det.2.cu13",
    "build": "24_hdim64_sm90",
    "tag": "py3-none-manylinux_2_28_x86_64",
    "python": ">=3.10",
    "requires": ("torch>=2.10", "einops"),
    "extras": (),
    "facts": {**FACTS, "fork_revision": 2},
}
PYTHON: Any = {
    "name": "flash_attn_4",
    "version": "4.0.0b36+det.1",
    "build": "",
    "tag": "py3-none-any",
    "python": ">=3.10",
    "requires": ("torch", "einops"),
    "extras": ("cu13",),
    "facts": {
        "format": 1,
        "upstream": {**FACTS["upstream"], "version": "4.0.0b36"},
        "fork_revision": 1,
        "series": FACTS["series"],
    },
}
# A wheel may hold any of its files changed: what was, to what is.
Change = Callable[[dict[str, bytes]], object]


def make(
    folder: Path, kind: dict[str, Any] = CUDA, *, change: Change | None = None, file: str = "", **other: Any
) -> Path:
    """Write a wheel.

    Args:
        folder: where.
        kind: what it is.
        change: made to its files before they are packed.
        file: its name, where that is to disagree.
        other: values of ``kind`` to be others; ``facts`` are added to its facts.
    """
    told = {**kind, **other}
    facts = {**kind["facts"], **other.get("facts", {})}
    name, version, build, tag = told["name"], told["version"], told["build"], told["tag"]
    info, package = f"{name}-{version}.dist-info", "flash_attn/cute" if name.endswith("4") else "flash_attn"
    lines = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nRequires-Python: {told['python']}"]
    lines += [f"Requires-Dist: {each}" for each in told["requires"]]
    lines += [f"Provides-Extra: {each}" for each in told["extras"]]
    about = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\n"
    about += f"Build: {build}\n" if build else ""
    entries = {
        f"{package}/here.py": f"tag = {tag!r}\n".encode(),
        f"{info}/METADATA": ("\n".join(lines) + "\n\nWords.\n").encode(),
        f"{info}/WHEEL": f"{about}Tag: {tag}\n".encode(),
    }
    entries = sbom.describe(entries, info, f"{package}/_fork.json", facts)
    if change:
        change(entries)
    middle = f"-{build}" if build else ""
    return pack(folder / (file or f"{name}-{version}{middle}-{tag}.whl"), info, entries)


def upstream(version: str) -> dict[str, Any]:
    """What a wheel says of another release of upstream."""
    return {"upstream": {**FACTS["upstream"], "version": version}}


def pack(path: Path, info: str, entries: dict[str, bytes]) -> Path:
    """Write a wheel of these files, and RECORD."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [",".join(contents.record_row(name, content)) for name, content in entries.items()]
    entries[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name, (2025, 1, 1, 0, 0, 0)), content)
    return path


def prove(path: Path, *, sha256: str, verified: bool = True) -> Path:
    """Write a proof beside a wheel."""
    proof = {
        "format": 1,
        "verified": verified,
        "wheel": {"sha256": sha256},
        "gpu": {"name": "NVIDIA H100", "compute_capability": "9.0", "driver": "580"} if verified else None,
        "torch": "2.11.0",
        "python": "3.12",
        "counts": {"passed": 2992},
        "controls": [],
        "cases": {},
    }
    place = companions.proof(path)
    place.write_bytes(sealed.render(sealed.seal(proof)))
    return place

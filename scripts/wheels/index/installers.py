"""The pages that installers read: HTML (PEP 503) and JSON (PEP 691), with what later PEPs added.

Hashes are in every link. Metadata lies beside each wheel (PEP 658, 714), so that an installer reads it
without the wheel. Yanked wheels say why (PEP 592). A provenance is linked where there is one (PEP 740).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from scripts.base.fetch import sha256

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from scripts.wheels.index.wheel_entries import Entry

API_VERSION = "1.3"  # the first with provenances
JSON_TYPE = "application/vnd.pypi.simple.v1+json"
FILES, VARIANTS, SIMPLE = "files", "variants", "simple"  # folders of an index


@dataclass(frozen=True)
class Link:
    """One file of a distribution, as its page tells it."""

    name: str
    url: str  # from the page
    sha256: str
    size: int
    requires_python: str = ""
    metadata: str = ""  # its sha256; none: it has none beside it
    yanked: str | None = None
    provenance: str = ""  # where it is

    def as_json(self) -> dict[str, Any]:
        """As PEP 691 spells it."""
        told: dict[str, Any] = {
            "filename": self.name,
            "url": self.url,
            "hashes": {"sha256": self.sha256},
            "size": self.size,
        }
        if self.requires_python:
            told["requires-python"] = self.requires_python
        if self.metadata:
            # Not dist-info-metadata, its name before PEP 714: pip 22.3 to 23.0 fails on a hash there.
            told["core-metadata"] = {"sha256": self.metadata}
        if self.yanked is not None:
            told["yanked"] = self.yanked
        if self.provenance:
            told["provenance"] = self.provenance
        return told


def of_entry(entry: Entry, url: str) -> list[Link]:
    """A wheel's link, and that of its variant.

    Args:
        entry: the wheel.
        url: the index's address; a provenance's must be whole, so without one it is left out.
    """
    wheel = entry.wheel
    metadata = hashlib.sha256(wheel.metadata).hexdigest()
    python = wheel.requires_python
    told = f"{url}{FILES}/{quote(provenance_name(entry))}" if entry.beside.attestations and url else ""
    place = f"../../{FILES}/{quote(entry.file)}"
    links = [Link(entry.file, place, wheel.sha256, wheel.size, python, metadata, entry.yanked, told)]
    if variant := entry.variant:
        path = variant.path
        place, size = f"../../{VARIANTS}/{quote(path.name)}", path.stat().st_size
        links.append(Link(path.name, place, variant.sha256, size, python, metadata, entry.yanked))
    return links


def provenance_name(entry: Entry) -> str:
    """The file with a wheel's attestations as one object."""
    return f"{entry.file}.provenance"


def of_listing(path: Path) -> Link:
    """The link of a version's document of variants."""
    return Link(path.name, f"../../{VARIANTS}/{quote(path.name)}", sha256(path), path.stat().st_size)


def project_json(name: str, versions: Sequence[str], links: Sequence[Link]) -> str:
    """A distribution's page in JSON."""
    told = {
        "meta": {"api-version": API_VERSION},
        "name": name,
        "versions": list(versions),
        "files": [link.as_json() for link in links],
    }
    return json.dumps(told, indent=1) + "\n"


def root_json(names: Sequence[str]) -> str:
    """The list of distributions in JSON."""
    projects = [{"name": name} for name in names]
    return json.dumps({"meta": {"api-version": API_VERSION}, "projects": projects}, indent=1) + "\n"

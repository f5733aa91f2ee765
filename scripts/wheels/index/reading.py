"""Read the wheels of an index: each is whole, and its version's label says what its metadata does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import parse_wheel_filename

from scripts.base import documents
from scripts.base.errors import WheelError
from scripts.wheels.index import label
from scripts.wheels.index.indexed_wheel import IndexedWheel, WheelFacts
from scripts.wheels.trust import evidence

if TYPE_CHECKING:
    from email.message import Message
    from pathlib import Path

_AGAIN = "build the wheel again"


def read(path: Path) -> IndexedWheel:
    """Read a wheel that agrees with itself, and compare its label.

    Raises:
        WheelError: it is damaged, no wheel of this project, or its name, metadata and label do not agree.
    """
    whole = evidence.whole(path)
    _check_specifiers(path, whole.metadata)
    place = whole.provenance_name
    facts = documents.parse(
        WheelFacts, whole.files[place], f"{path}: {place}", error=WheelError, remedy=_AGAIN
    )
    _, version, build, tags = parse_wheel_filename(path.name)  # which says what METADATA and WHEEL say
    wheel = IndexedWheel(
        path,
        whole.distribution,
        version,
        "".join(map(str, build)),
        tags,
        next(content for name, content in whole.files.items() if name.endswith(".dist-info/METADATA")),
        whole.metadata,
        facts,
        whole.sha256,
        path.stat().st_size,
    )
    if mistakes := list(label.mistakes(wheel)):
        raise WheelError(f"{path}: {'; '.join(mistakes)}; {_AGAIN}.")
    return wheel


def _check_specifiers(path: Path, said: Message) -> None:
    """What METADATA asks for can be read."""
    try:
        SpecifierSet(said.get("Requires-Python", ""))
        for text in said.get_all("Requires-Dist", []):
            Requirement(text)
    except (InvalidSpecifier, InvalidRequirement) as e:
        raise WheelError(f"{path}: METADATA: {e}; {_AGAIN}.") from None

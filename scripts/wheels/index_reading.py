"""Read the wheels of an index: every file compared with RECORD, and the name with the metadata."""

from __future__ import annotations

import csv
import zipfile
import zlib
from typing import TYPE_CHECKING

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from wheel.wheelfile import WheelError as RecordError
from wheel.wheelfile import WheelFile

from scripts.base import documents
from scripts.base.errors import WheelError
from scripts.base.fetch import sha256
from scripts.wheels import index_label
from scripts.wheels.index_wheel import IndexedWheel, WheelFacts

if TYPE_CHECKING:
    from pathlib import Path

    from packaging.metadata import RawMetadata
    from packaging.tags import Tag
    from packaging.version import Version

_AGAIN = "build the wheel again"
# What a damaged archive raises besides: an unknown compression, a cut stream, a RECORD that is no table.
_DAMAGE = (KeyError, ValueError, EOFError, NotImplementedError, RuntimeError, zlib.error)


def read(path: Path) -> IndexedWheel:
    """Read a wheel, and compare all of it.

    Raises:
        WheelError: it is damaged, no wheel of this project, or its name, metadata and label do not agree.
    """
    name, version, build, tags = _name_of(path)
    entries = contents(path)
    info = "-".join(path.name.split("-")[:2]) + ".dist-info"
    try:
        metadata, about = entries[f"{info}/METADATA"], entries[f"{info}/WHEEL"]
    except KeyError as e:
        raise WheelError(f"{path}: has no {e.args[0]}; {_AGAIN}.") from None
    wheel = IndexedWheel(
        path,
        name,
        version,
        build,
        tags,
        metadata,
        _said(path, metadata),
        _facts(path, entries),
        sha256(path),
        path.stat().st_size,
    )
    if mistakes := index_label.mistakes(wheel, about):
        raise WheelError(f"{path}: {'; '.join(mistakes)}; {_AGAIN}.")
    return wheel


def contents(path: Path) -> dict[str, bytes]:
    """The files of a wheel, each compared with RECORD.

    Raises:
        WheelError: a file's name, where one is changed, added or missing.
    """
    try:
        with WheelFile(path) as archive:
            names = archive.namelist()
            entries = {name: archive.read(name) for name in names}
            record = entries[archive.record_path].decode("utf-8")
    except (RecordError, zipfile.BadZipFile, *_DAMAGE) as e:
        raise WheelError(f"{path}: damaged, renamed, or not a wheel: {e}; {_AGAIN}.") from e
    if len(entries) != len(names):
        raise WheelError(f"{path}: holds a file twice; {_AGAIN}.")
    if missing := [row[0] for row in csv.reader(record.splitlines()) if row and row[0] not in entries]:
        raise WheelError(f"{path}: {missing[0]} of RECORD is missing; {_AGAIN}.")
    return entries


def _name_of(path: Path) -> tuple[str, Version, str, frozenset[Tag]]:
    try:
        name, version, build, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as e:
        raise WheelError(f"{path}: {e}; give the wheel the name that its build gave it.") from None
    return canonicalize_name(name), version, "".join(map(str, build)), tags


def _said(path: Path, metadata: bytes) -> RawMetadata:
    said, unknown = parse_email(metadata)
    try:
        SpecifierSet(said.get("requires_python", ""))
        for text in said.get("requires_dist", []):
            Requirement(text)
    except (InvalidSpecifier, InvalidRequirement) as e:
        raise WheelError(f"{path}: METADATA: {e}; {_AGAIN}.") from None
    if missing := [key for key in ("name", "version") if key not in said]:
        flaw = f"METADATA has no readable {missing[0].title()}"
        raise WheelError(f"{path}: {flaw}{f' ({sorted(unknown)})' if unknown else ''}; {_AGAIN}.")
    return said


def _facts(path: Path, entries: dict[str, bytes]) -> WheelFacts:
    places = [name for name in entries if name.endswith("/_fork.json")]
    if len(places) != 1:
        raise WheelError(
            f"{path}: has {len(places)} files _fork.json, so it is no wheel of this project; take it out."
        )
    where = f"{path}: {places[0]}"
    return documents.parse(WheelFacts, entries[places[0]], where, error=WheelError, remedy=_AGAIN)

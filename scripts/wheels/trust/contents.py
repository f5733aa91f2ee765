"""Read a wheel and check that it is whole: every file against RECORD, and what it says of itself.

What a wheel is comes from its own METADATA, WHEEL, RECORD and ``_fork.json``.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import zipfile
import zlib
from dataclasses import dataclass
from email.parser import Parser
from typing import TYPE_CHECKING, Any

from packaging.tags import parse_tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from scripts.base import documents, sealed
from scripts.base.errors import UsageError, WheelError
from scripts.wheels.trust.models import Provenance

if TYPE_CHECKING:
    from email.message import Message
    from pathlib import Path

_REMEDY = "fetch or build the wheel again"
_ELF = b"\x7fELF"
_SIGNATURES = (".dist-info/RECORD.jws", ".dist-info/RECORD.p7s")  # which RECORD does not list


@dataclass(frozen=True)
class Contents:
    """A whole wheel: what is in it agrees with what it says."""

    path: Path
    sha256: str
    files: dict[str, bytes]
    metadata: Message
    tags: tuple[str, ...]
    provenance_name: str
    facts: dict[str, Any]  # what _fork.json holds
    provenance: Provenance  # the part of it that this program reads

    @property
    def distribution(self) -> str:
        """Its normalised name, such as ``flash-attn``."""
        return canonicalize_name(self.metadata["Name"])

    @property
    def version(self) -> str:
        """Such as ``2.8.3.post1+det.2.cu13``."""
        return str(self.metadata["Version"])

    @property
    def extensions(self) -> dict[str, bytes]:
        """The compiled files, by name."""
        return elf_files(self.files)

    @property
    def sboms(self) -> dict[str, bytes]:
        """The SBOMs, by name (PEP 770): ours, and any of a program that repaired the wheel."""
        return {name: content for name, content in self.files.items() if ".dist-info/sboms/" in name}


def elf_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """Those that are ELF files."""
    return {name: content for name, content in files.items() if content.startswith(_ELF)}


def read(path: Path) -> Contents:
    """Read a wheel, and check each file in it.

    Raises:
        UsageError: there is no such file.
        WheelError: it is no wheel of this project, or was changed; the message names the file.
    """
    if not path.is_file():
        raise UsageError(f"{path} does not exist.")
    whole = path.read_bytes()
    files = _unpacked(path, whole)
    info = _info_folder(path, files)
    _check_record(path, info, files)
    metadata = Parser().parsestr(_text(path, f"{info}/METADATA", files))
    about = Parser().parsestr(_text(path, f"{info}/WHEEL", files))
    tags = tuple(about.get_all("Tag", []))
    _check_name(path, info, metadata, about)
    name, facts, provenance = _provenance(path, files)
    return Contents(path, hashlib.sha256(whole).hexdigest(), files, metadata, tags, name, facts, provenance)


def _unpacked(path: Path, whole: bytes) -> dict[str, bytes]:
    """Each file of an archive, against its checksum."""
    try:
        with zipfile.ZipFile(io.BytesIO(whole)) as archive:
            names = archive.namelist()
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise WheelError(f"{path}: {twice[0]} is in it twice; {_REMEDY}.")
            if damaged := archive.testzip():
                raise WheelError(f"{path}: {damaged} is damaged; {_REMEDY}.")
            return {name: archive.read(name) for name in names if not name.endswith("/")}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as e:
        raise WheelError(f"{path}: not a wheel of this project, or cut off: {e}.") from e


def _info_folder(path: Path, files: dict[str, bytes]) -> str:
    folders = {name.partition("/")[0] for name in files if name.partition("/")[0].endswith(".dist-info")}
    if len(folders) != 1:
        raise WheelError(f"{path}: has {len(folders)} folders *.dist-info, where a wheel has one; {_REMEDY}.")
    return folders.pop()


def _text(path: Path, name: str, files: dict[str, bytes]) -> str:
    try:
        return files[name].decode("utf-8")
    except KeyError:
        raise WheelError(f"{path}: {name} is missing; {_REMEDY}.") from None
    except UnicodeDecodeError as e:
        raise WheelError(f"{path}: {name} is no text: {e}; {_REMEDY}.") from e


def record_row(name: str, content: bytes) -> list[str]:
    """What RECORD says of a file."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return [name, f"sha256={digest}", str(len(content))]


def _check_record(path: Path, info: str, files: dict[str, bytes]) -> None:
    """RECORD has each file once, by its hash and size, and none besides."""
    record = f"{info}/RECORD"
    rows = list(csv.reader(io.StringIO(_text(path, record, files))))
    listed: dict[str, list[str]] = {}
    for line, row in enumerate(rows, 1):
        if len(row) != 3 or row[0] in listed:
            flaw = "is no row of three fields" if len(row) != 3 else f"has {row[0]} a second time"
            raise WheelError(f"{path}: {record}:{line} {flaw}; {_REMEDY}.")
        listed[row[0]] = row
    bare = {record, *(name for name in files if name.endswith(_SIGNATURES))}
    if listed.pop(record, None) != [record, "", ""]:
        raise WheelError(f"{path}: {record} was changed: its row of itself is not '{record},,'; {_REMEDY}.")
    for name in sorted({*files} - bare - {*listed}):
        raise WheelError(f"{path}: {name} was added: {record} does not list it; {_REMEDY}.")
    for name, row in listed.items():
        if name not in files:
            raise WheelError(f"{path}: {name} was removed: {record} lists it; {_REMEDY}.")
        if row != record_row(name, files[name]):
            raise WheelError(f"{path}: {name} was changed, or {record} was: hash or size differ; {_REMEDY}.")


def _check_name(path: Path, info: str, metadata: Message, about: Message) -> None:
    """The file's name says what METADATA and WHEEL say."""
    try:
        name, version, build, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as e:
        raise WheelError(f"{path}: {e}.") from e
    said = {tag for text in about.get_all("Tag", []) for tag in parse_tag(text)}
    tag = "".join(map(str, build)) if build else None
    told = {
        "name": (name, canonicalize_name(metadata["Name"] or "")),
        "version": (str(version), str(metadata["Version"])),
        "build tag": (tag, about["Build"]),
        "tags": (sorted(map(str, tags)), sorted(map(str, said))),
        "folder": (f"{'-'.join(path.name.split('-')[:2])}.dist-info", info),
    }
    for what, (ours, theirs) in told.items():
        if ours != theirs:
            raise WheelError(
                f"{path}: the {what} by its file name is {ours}, and what is in it says {theirs}; it was "
                "renamed or changed."
            )


def _provenance(path: Path, files: dict[str, bytes]) -> tuple[str, dict[str, Any], Provenance]:
    """The place and the content of ``_fork.json``, which must carry its own digest."""
    names = [name for name in files if name.endswith("/_fork.json")]
    if len(names) != 1:
        raise WheelError(f"{path}: not a wheel of this project: it has {len(names)} files _fork.json.")
    where, content = f"{path}: {names[0]}", files[names[0]]
    provenance = documents.parse(Provenance, content, where, error=WheelError, remedy=_REMEDY)
    if flaw := sealed.flaw(content):
        raise WheelError(f"{where} {flaw}; {_REMEDY}.")
    return names[0], json.loads(content), provenance

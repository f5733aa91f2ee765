"""The SBOM of a wheel: CycloneDX, in ``.dist-info/sboms`` (PEP 770).

It follows from ``_fork.json`` and the libraries that the extensions ask for, so a second build gives the same
bytes: the date is that of the wheel's entries, and the serial number is made of the rest.
"""

from __future__ import annotations

import json
import re
import uuid
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cyclonedx.model import (
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import (
    Commit,
    Component,
    ComponentScope,
    ComponentType,
    Diff,
    Patch,
    PatchClassification,
    Pedigree,
)
from cyclonedx.model.issue import IssueClassification, IssueType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from scripts.base import sealed
from scripts.wheels.trust import binaries
from scripts.wheels.trust.contents import elf_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.wheels.trust.contents import Contents

NAMESPACE = "flash-attention-deterministic"  # of properties
PROVENANCE_DIGEST = f"{NAMESPACE}:provenance-digest"
_DATE = datetime(2025, 1, 1, tzinfo=timezone.utc)  # as of the wheel's entries
_SERIALS = uuid.uuid5(uuid.NAMESPACE_URL, f"urn:{NAMESPACE}:sbom")
REPOSITORY = "https://github.com/Dao-AILab/flash-attention"
CUTLASS = "https://github.com/NVIDIA/cutlass"


def describe(entries: dict[str, bytes], info: str, place: str, facts: dict[str, Any]) -> dict[str, bytes]:
    """A wheel's files with what it says of itself: the sealed provenance, and the SBOM.

    Args:
        entries: its other files.
        info: its folder ``*.dist-info``.
        place: where the provenance lies.
        facts: what that says.
    """
    told, (name, version) = sealed.seal(facts), info.removesuffix(".dist-info").split("-", 1)
    found = elf_files(entries)
    inside = {PurePosixPath(elf).name for elf in found}
    libraries = {library for elf in found.values() for library in binaries.needed_by(elf)} - inside
    bom = render(name.replace("_", "-"), version, told, sorted(libraries))
    return {**entries, place: sealed.render(told), f"{info}/sboms/{name}.cdx.json": bom}


def name_in(wheel: Contents) -> str:
    """Where a wheel's SBOM lies."""
    name, version = wheel.path.name.split("-")[:2]
    return f"{name}-{version}.dist-info/sboms/{name}.cdx.json"


def render(name: str, version: str, facts: dict[str, Any], needed: list[str], *, upstream: str = "") -> bytes:
    """The SBOM of a wheel, or of an archive.

    Args:
        name: of the wheel's distribution, or of the archive.
        version: of the wheel.
        facts: its sealed provenance.
        needed: the shared libraries that its extensions ask the loader for.
        upstream: of an archive, which no package index has: the distribution that it was made from.
    """
    wheel = _wheel(name, version, facts, upstream)
    code = [*_headers(facts), *_linked(facts, needed), *_own_files(facts)]
    bom = Bom(
        serial_number=_SERIALS,
        components=[*_compilers(facts), *code],
        metadata=BomMetaData(
            timestamp=_DATE,
            component=wheel,
            properties=[
                Property(name=PROVENANCE_DIGEST, value=facts[sealed.SEAL]),
                Property(name=f"{NAMESPACE}:series-digest", value=facts["series"]["digest"]),
            ],
        ),
    )
    bom.register_dependency(wheel, code)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    return sealed.render({**document, "serialNumber": serial(document)})


def serial(document: dict[str, Any]) -> str:
    """The serial number of an SBOM: made of all the rest."""
    rest = {key: value for key, value in document.items() if key != "serialNumber"}
    return uuid.uuid5(_SERIALS, json.dumps(rest, sort_keys=True)).urn


def flaw(content: bytes, facts: dict[str, Any]) -> str:
    """What is wrong with a wheel's SBOM, as the end of a sentence; nothing for a sound one."""
    try:
        document = json.loads(content)
    except ValueError as e:
        return f"is no JSON: {e}"
    if not isinstance(document, dict) or document.get("serialNumber") != serial(document):
        return "was changed: its serial number is not that of what it says"
    if sealed.render(document) != content:
        return "was changed: it is not written as this program writes it"
    if _property(document, PROVENANCE_DIGEST) != facts[sealed.SEAL]:
        return "is of another _fork.json than the wheel's"
    return ""


def _property(document: dict[str, Any], name: str) -> str | None:
    listed = document.get("metadata", {}).get("properties", [])
    return next((entry["value"] for entry in listed if entry.get("name") == name), None)


def _wheel(name: str, version: str, facts: dict[str, Any], upstream: str) -> Component:
    """The wheel, or the archive: upstream's release with the patches."""
    patches = facts["series"]["patches"]
    commit = facts["upstream"]["commit"]
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref="archive" if upstream else "wheel",
        purl=PackageURL("generic" if upstream else "pypi", name=name, version=version),
        licenses=[DisjunctiveLicense(id="BSD-3-Clause")],
        pedigree=Pedigree(
            ancestors=[_upstream(upstream or name, facts["upstream"])],
            commits=[Commit(uid=commit, url=XsUri(f"{REPOSITORY}/commit/{commit}"))]
            if _known(commit)
            else [],
            patches=[_patch(patch) for patch in patches],
            notes="The patches apply in this order: " + ", ".join(patch["name"] for patch in patches),
        ),
    )


def _known(commit: str) -> bool:
    """Whether a pin has it: ``unknown`` stands for one that nobody has looked up."""
    return re.fullmatch(r"[0-9a-f]{40}", commit) is not None


def _upstream(name: str, pin: dict[str, Any]) -> Component:
    """The release, by the hash of its sdist and by its commit."""
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=pin["version"],
        bom_ref="upstream",
        purl=PackageURL("pypi", name=name, version=pin["version"]),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=pin["sdist_sha256"])]
        if len(pin["sdist_sha256"]) == 64
        else [],
        external_references=[
            ExternalReference(
                type=ExternalReferenceType.VCS, url=XsUri(REPOSITORY), comment=f"commit {pin['commit']}"
            )
        ],
    )


def _patch(patch: dict[str, str]) -> Patch:
    """One patch; CycloneDX gives a patch no hash of its own, so it stands in what the patch resolves."""
    status = patch["upstream_status"]
    kind = PatchClassification.BACKPORT if status.startswith("Backport") else PatchClassification.UNOFFICIAL
    return Patch(
        type=kind,
        diff=Diff(url=XsUri(patch["name"])),
        resolves=[
            IssueType(
                type=IssueClassification.ENHANCEMENT,
                id=patch["name"],
                name=patch["subject"],
                description=f"Upstream-Status: {status}\nsha256: {patch['sha256']}",
            )
        ],
    )


def release(text: str) -> str:
    """The release in what a compiler says of itself.

    >>> release("g++ (Debian 12.2.0-14+deb12u1) 12.2.0"), release("V13.0.88")
    ('12.2.0', '13.0.88')
    """
    numbers = re.findall(r"(?<![\w.])V?(\d+(?:\.\d+)+)(?![\w.+-])", text)
    return numbers[-1] if numbers else text


def compilers(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The compilers that a wheel was made with, and what each says is its version."""
    if "nvcc" in facts:
        yield "nvcc", facts["nvcc"]["version"]
    if "cxx" in facts:
        yield facts["cxx"]["version"].partition(" ")[0], facts["cxx"]["version"]


def _compilers(facts: dict[str, Any]) -> Iterator[Component]:
    """What compiled it, and is not in it."""
    for name, version in compilers(facts):
        yield Component(
            type=ComponentType.APPLICATION,
            name=name,
            version=release(version),
            description=version,
            bom_ref=f"compiler:{name}",
            scope=ComponentScope.EXCLUDED,
            purl=PackageURL("generic", name=name, version=release(version)),
        )


def _headers(facts: dict[str, Any]) -> Iterator[Component]:
    """Headers of others that are compiled in."""
    if commit := facts["upstream"].get("cutlass"):
        yield Component(
            type=ComponentType.LIBRARY,
            name="cutlass",
            version=commit,
            bom_ref="headers:cutlass",
            description="headers that are compiled in",
            purl=PackageURL("github", "nvidia", "cutlass", commit),
            external_references=[ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(CUTLASS))],
        )
    if ffi := facts.get("tvm_ffi"):
        yield Component(
            type=ComponentType.LIBRARY,
            name="apache-tvm-ffi",
            version=ffi,
            bom_ref="headers:apache-tvm-ffi",
            description="headers that are compiled in",
            purl=PackageURL("pypi", name="apache-tvm-ffi", version=ffi),
        )


def _own_files(facts: dict[str, Any]) -> Iterator[Component]:
    """The sources that are the fork's own, by hash; of wheels whose patches added them none."""
    for name, sha256 in facts["series"].get("own_files", {}).items():
        yield Component(
            type=ComponentType.FILE,
            name=name,
            bom_ref=f"own:{name}",
            description="a source of the fork's own, beside upstream's",
            scope=ComponentScope.EXCLUDED,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)],
        )


def _linked(facts: dict[str, Any], needed: list[str]) -> Iterator[Component]:
    """Libraries that the loader finds for the wheel, and those whose code it holds."""
    for linkage, libraries in (("dynamic", needed), ("static", facts.get("static_libraries", []))):
        for library in libraries:
            yield Component(
                type=ComponentType.LIBRARY,
                name=library,
                bom_ref=f"{linkage}:{library}",
                properties=[Property(name=f"{NAMESPACE}:linkage", value=linkage)],
            )

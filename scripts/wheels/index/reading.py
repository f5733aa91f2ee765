"""Read the wheels of an index, and what lies beside each: proof, statements and attestations.

Each wheel is whole, and its name says what is in it: the version's label, the build tag, the Pythons.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import parse_wheel_filename

from scripts.base import documents
from scripts.base.errors import WheelError
from scripts.wheels.index.indexed_wheel import IndexedWheel, WheelFacts
from scripts.wheels.trust import companions, evidence

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message
    from pathlib import Path

    from scripts.wheels.trust.models import Proof

_AGAIN = "build the wheel again"
_MADE = (".whl.metadata", ".whl.provenance")  # what an index itself puts beside a wheel


def read(path: Path) -> IndexedWheel:
    """Read a wheel that agrees with itself, and compare what its name tells with what is in it.

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
    if mistakes := list(_mistakes(wheel)):
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


def _mistakes(wheel: IndexedWheel) -> Iterator[str]:
    """What a wheel's name tells besides and its content does not, each as a clause.

    The label is the version's local part, such as ``det.2.cu13``: the series' release, CUDA's major release.
    """
    yield from _of_label(wheel)
    yield from _of_build_tag(wheel)
    yield from _of_requirements(wheel)


def _of_label(wheel: IndexedWheel) -> Iterator[str]:
    facts, label = wheel.facts, wheel.version.local or ""
    words = label.split(".")
    if words[:2] != ["det", str(facts.fork_revision)]:
        right = f"det.{facts.fork_revision}"
        yield f"the label {label or '(none)'} does not begin with {right}, as _fork.json says"
    public, _, commit = facts.upstream.version.partition("+")
    # A version of another release than the wheel's names the wheel's own after "of".
    if public != wheel.version.public and f".of.{public}" not in f".{label}":
        yield f"the version is {wheel.version.public}, _fork.json says upstream's is {public}"
    if commit and commit not in words:
        yield f"the label {label} does not name upstream's commit {commit}, as _fork.json says"
    named = [word for word in words if re.fullmatch(r"cu\d+", word)]
    if named != ([f"cu{facts.cuda_major}"] if facts.cuda else []):
        yield f"the label says CUDA {', '.join(named) or 'none'}, _fork.json says {facts.cuda or 'none'}"


def _of_build_tag(wheel: IndexedWheel) -> Iterator[str]:
    named = re.findall(r"(?:^|_)sm(\d+)(?=_|$)", wheel.build)
    if named and sorted(named) != sorted(wheel.facts.architectures):
        told_of = ", ".join(wheel.facts.architectures) or "none"
        yield f"the build tag says architectures {', '.join(named)}, _fork.json says {told_of}"


def _of_requirements(wheel: IndexedWheel) -> Iterator[str]:
    allowed = SpecifierSet(wheel.requires_python)
    for python in wheel.pythons:
        if python not in allowed and not any(tag.abi == "abi3" for tag in wheel.tags):
            told_of = wheel.requires_python
            yield f"the file name says Python {python}, METADATA says Requires-Python: {told_of}"
    tried = wheel.facts.torch
    asked = [r for r in map(Requirement, wheel.requirements) if r.name == "torch"]
    if tried and not (asked and asked[0].specifier.contains(tried)):
        yield f"METADATA asks for {asked[0] if asked else 'no torch'}, _fork.json says torch {tried}"


@dataclass(frozen=True)
class Beside:
    """The files that lie beside a wheel and begin with its name."""

    proof_file: Path | None
    proof: Proof | None
    others: tuple[Path, ...]  # attestations and the like

    @property
    def proved_on(self) -> str:
        """The GPU that the whole suite passed on; empty: none."""
        if self.proof is None or not self.proof.verified or self.proof.gpu is None:
            return ""
        return f"{self.proof.gpu.name} ({self.proof.gpu.compute_capability})"

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them."""
        return (*((self.proof_file,) if self.proof_file else ()), *self.others)

    @property
    def attestations(self) -> tuple[Path, ...]:
        """Those that are attestation objects of PEP 740, by their names."""
        return tuple(path for path in self.others if path.suffix == ".attestation")

    def provenance(self) -> str:
        """The attestations as one provenance object of PEP 740; empty: there are none.

        Who signed is in their certificates, which nothing here judges: so the publisher has no kind.

        Raises:
            WheelError: one is damaged.
        """
        if not self.attestations:
            return ""
        bundle = {"publisher": {"kind": "unknown"}, "attestations": [_object(p) for p in self.attestations]}
        return json.dumps({"version": 1, "attestation_bundles": [bundle]}, indent=1) + "\n"


def beside(wheel: IndexedWheel) -> Beside:
    """Find what lies beside a wheel.

    Raises:
        VerifyError: the proof is damaged.
        WheelError: it was changed, or is one of another wheel.
    """
    place = companions.proof(wheel.path)
    proof = evidence.proof_beside(wheel.path, wheel.sha256)
    begins = (f"{wheel.path.name}.", f"{wheel.path.stem}.")
    others = tuple(
        path
        for path in sorted(wheel.path.parent.iterdir())
        if path.name.startswith(begins)
        and path not in (wheel.path, place)
        and not path.name.endswith(_MADE)
        and not _is_unfinished(path)
    )
    return Beside(place if proof else None, proof, others)


def _is_unfinished(path: Path) -> bool:
    return not path.is_file() or path.suffix == ".part"


def _object(path: Path) -> Any:
    try:
        told = json.loads(path.read_bytes())
    except ValueError as e:
        raise WheelError(
            f"{path} is no attestation: {e}. Sign again, or take it out of the folder."
        ) from None
    if not (isinstance(told, dict) and "envelope" in told):
        raise WheelError(f"{path} is no attestation: it has no envelope. Sign again, or take it out.")
    return told

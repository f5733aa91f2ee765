"""Check a wheel and all that lies beside it, before anything of it is installed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scripts.base import console, files, sealed
from scripts.base.errors import WheelError
from scripts.wheels.trust import companions, contents, sbom, signing, statements
from scripts.wheels.trust.models import read_proof

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.wheels.trust.contents import Contents
    from scripts.wheels.trust.models import Proof


@dataclass(frozen=True)
class Trusted:
    """A wheel whose every hash was checked, and what lies beside it."""

    wheel: Contents
    proof: Proof | None
    statements: tuple[Path, ...] = ()
    signers: dict[str, str] = field(default_factory=dict)  # of a signed statement, by its file's name


def whole(path: Path) -> Contents:
    """A wheel that agrees with itself: each file with RECORD, the provenance with its digest, the SBOM.

    Raises:
        UsageError: there is no such file.
        WheelError: it does not; the message names the file.
    """
    wheel = contents.read(path)
    name = sbom.name_in(wheel)
    if name not in wheel.sboms:
        raise WheelError(f"{path}: {name} is missing; fetch or build the wheel again.")
    if flaw := sbom.flaw(wheel.sboms[name], wheel.facts):
        raise WheelError(f"{path}: {name} {flaw}; fetch or build the wheel again.")
    return wheel


def check(path: Path) -> Trusted:
    """The same, with the proof, the statements and the signatures that lie beside the wheel.

    Raises:
        UsageError: there is no such wheel.
        VerifyError: its proof is damaged.
        WheelError: something was changed, or is of another wheel; the message names the file.
    """
    wheel = whole(path)
    proof = proof_beside(wheel.path, wheel.sha256)
    found: list[Path] = []
    signers: dict[str, str] = {}
    for statement, attestation, expected in _expected(wheel, proof):
        if expected is None:
            for stray in (statement, attestation):
                if stray.exists():
                    raise WheelError(
                        f"{stray} tells of a proof, and {companions.proof(path).name} is missing."
                    )
            continue
        if statement.exists():
            if statement.read_bytes() != expected:
                raise WheelError(
                    f"{statement} was changed, or is of another wheel: {path.name} and its proof give other "
                    "bytes. Delete it, and build or verify the wheel again."
                )
            found.append(statement)
        if attestation.exists():
            signers[attestation.name] = signing.check(attestation, expected)
    return Trusted(wheel, proof, tuple(found), signers)


def _expected(wheel: Contents, proof: Proof | None) -> list[tuple[Path, Path, bytes | None]]:
    """Each statement's place, its attestation's, and the bytes that it must have."""
    path = wheel.path
    told = (
        companions.provenance(path),
        companions.provenance_attestation(path),
        statements.provenance(wheel),
    )
    of_proof = companions.proof_statement(path), companions.proof_attestation(path)
    return [told, (*of_proof, None if proof is None else _told(wheel, proof))]


def proof_beside(path: Path, sha256: str) -> Proof | None:
    """The proof beside a wheel, which must be whole and of this wheel.

    Args:
        path: the wheel.
        sha256: of its bytes.
    """
    place = companions.proof(path)
    if not place.exists():
        return None
    remedy = f"delete it, and run nox -s verify -- {path}"
    if flaw := sealed.flaw(place.read_bytes()):
        raise WheelError(f"{place} {flaw}; {remedy}.")
    proof = read_proof(place)
    told = proof.wheel.sha256 if proof.wheel else "no wheel"
    if told != sha256:
        raise WheelError(
            f"{place} is of another wheel (sha256 {told[:16]}…) than {path.name} ({sha256[:16]}…); {remedy}."
        )
    return proof


def sign_missing(trusted: Trusted) -> bool:
    """Sign each statement beside a wheel that has no signature yet; whether there was one."""
    signed = False
    for statement, attestation, expected in _expected(trusted.wheel, trusted.proof):
        if expected is not None and statement.exists() and not attestation.exists():
            signing.sign(statement, attestation)
            console.done(f"{attestation} is signed.")
            signed = True
    return signed


def attest_build(path: Path, *, sign: bool = False) -> None:
    """Write the statement of how a wheel was built; sign it where that is asked for."""
    place, attestation = companions.provenance(path), companions.provenance_attestation(path)
    _attest(place, attestation, statements.provenance(whole(path)), sign=sign)


def attest_proof(path: Path, *, sign: bool = False) -> None:
    """Write the statement of what a wheel's suite found, likewise.

    Raises:
        WheelError: no proof of this wheel lies beside it.
    """
    wheel = whole(path)
    proof = proof_beside(wheel.path, wheel.sha256)
    if proof is None:
        raise WheelError(f"{companions.proof(path)} is missing; run nox -s verify -- {path}.")
    place, attestation = companions.proof_statement(path), companions.proof_attestation(path)
    _attest(place, attestation, _told(wheel, proof), sign=sign)


def _attest(place: Path, attestation: Path, statement: bytes, *, sign: bool) -> None:
    files.write(place, statement.decode())
    if sign:
        signing.sign(place, attestation)
        console.done(f"{attestation} is signed.")


def _told(wheel: Contents, proof: Proof) -> bytes:
    """The statement of a proof, as its file is now."""
    digest = hashlib.sha256(companions.proof(wheel.path).read_bytes()).hexdigest()
    return statements.proof(wheel, proof, digest)

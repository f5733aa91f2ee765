"""The files that lie beside a wheel and tell of it: their names, and when they go."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def proof(wheel: Path) -> Path:
    """What its suite found."""
    return wheel.with_suffix(".proof.json")


def provenance(wheel: Path) -> Path:
    """The statement of how it was built (in-toto, SLSA), not signed."""
    return wheel.with_suffix(".provenance.json")


def proof_statement(wheel: Path) -> Path:
    """The statement of its proof (in-toto), not signed."""
    return wheel.with_suffix(".proof.statement.json")


def provenance_attestation(wheel: Path) -> Path:
    """The signed statement of how it was built (PEP 740), by the name that upload tools look for."""
    return wheel.with_name(wheel.name + ".slsa.attestation")


def proof_attestation(wheel: Path) -> Path:
    """The signed statement of its proof, likewise."""
    return wheel.with_name(wheel.name + ".proof.attestation")


def of_proof(wheel: Path) -> tuple[Path, ...]:
    """What goes when a wheel is proved anew."""
    return proof(wheel), proof_statement(wheel), proof_attestation(wheel)


def of_bytes(wheel: Path) -> tuple[Path, ...]:
    """What goes when a wheel's bytes are others: all of it."""
    return *of_proof(wheel), provenance(wheel), provenance_attestation(wheel)

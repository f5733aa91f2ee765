"""What lies beside a wheel: its proof, and attestations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.base.errors import VerifyError
from scripts.wheels import wheel as packing
from scripts.wheels.proof import read_proof

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.wheels.index_wheel import IndexedWheel
    from scripts.wheels.proof import Proof


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
    def provenance(self) -> Path | None:
        """The one that is a provenance object of PEP 740."""
        return next((path for path in self.others if _is_provenance(path)), None)


def of(wheel: IndexedWheel) -> Beside:
    """Find them.

    Raises:
        VerifyError: the proof is damaged, or is one of another wheel.
    """
    place = packing.proof_path(wheel.path)
    proof = read_proof(place) if place.is_file() else None
    if proof is not None and (proof.wheel is None or proof.wheel.sha256 != wheel.sha256):
        named = proof.wheel.sha256 if proof.wheel else "no wheel"
        raise VerifyError(
            f"{place} is a proof of {named}; {wheel.path.name} is {wheel.sha256}. Run nox -s verify again, "
            "or take the proof out of the folder."
        )
    begins = (f"{wheel.path.name}.", f"{wheel.path.stem}.")
    others = tuple(
        path
        for path in sorted(wheel.path.parent.iterdir())
        if path.name.startswith(begins) and path not in (wheel.path, place) and not _is_unfinished(path)
    )
    return Beside(place if proof else None, proof, others)


def _is_unfinished(path: Path) -> bool:
    return not path.is_file() or path.suffix == ".part"


def _is_provenance(path: Path) -> bool:
    try:
        told = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(told, dict) and told.get("version") == 1 and "attestation_bundles" in told

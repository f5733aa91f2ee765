"""What lies beside a wheel: its proof, statements and attestations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scripts.base.errors import WheelError
from scripts.wheels.trust import companions, evidence

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.wheels.index.indexed_wheel import IndexedWheel
    from scripts.wheels.trust.models import Proof


_MADE = (".whl.metadata", ".whl.provenance")  # what an index itself puts beside a wheel


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


def of(wheel: IndexedWheel) -> Beside:
    """Find them.

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

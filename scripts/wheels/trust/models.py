"""What a wheel says of itself (``_fork.json``), and its proof, as far as this program reads them.

``scripts/wheels/packing/metadata`` writes the first, ``tests/wheel/ledger.py`` the second, without pydantic.
Both hold more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from scripts.base import documents
from scripts.base.documents import OpenDocument
from scripts.base.errors import VerifyError

if TYPE_CHECKING:
    from pathlib import Path


class PatchDigest(OpenDocument):
    """One patch of a wheel's series."""

    name: str
    sha256: str


class SeriesFacts(OpenDocument):
    """The series that a wheel was built from."""

    digest: str
    base: str
    patches: tuple[PatchDigest, ...]
    own_files: dict[str, str] = Field(default_factory=dict)  # path to sha256; once patches held them


class Provenance(OpenDocument):
    """What ``flash_attn/_fork.json`` holds."""

    format: Literal[1]
    torch: str = ""  # that it is tried beside; none where its suite says which
    architectures: tuple[str, ...] = ()  # none: its kernels are compiled at their first use
    cuda: str = ""  # the release, where machine code is in the wheel
    series: SeriesFacts


class WheelDigest(OpenDocument):
    """The wheel that was proved."""

    sha256: str


class Gpu(OpenDocument):
    """The GPU it was proved on."""

    name: str
    compute_capability: str  # such as 9.0
    driver: str


class Control(OpenDocument):
    """A negative control: whether bits differ with the mode off."""

    differs: bool
    must_differ: bool


class Case(OpenDocument):
    """One case of the suite."""

    outcome: str
    mismatch: dict[str, Any] | None = None
    error: str = ""

    @property
    def what_failed(self) -> str:
        """The first mismatch, or the error."""
        if self.mismatch is None:
            return self.error
        bits = " and ".join(map(str, self.mismatch.get("bits", ())))
        return f"first mismatch at {self.mismatch.get('index')}: {bits} ({self.mismatch.get('what')})"


class UpstreamCases(OpenDocument):
    """Upstream's own cases, which the suite runs a part of: outcomes by mode."""

    counts: dict[str, dict[str, int]]


class Proof(OpenDocument):
    """What the suite leaves of one wheel."""

    format: Literal[1]
    verified: bool
    counts: dict[str, int]  # of cases, by outcome
    wheel: WheelDigest | None
    gpu: Gpu | None
    torch: str
    python: str
    controls: tuple[Control, ...]
    cases: dict[str, Case]
    upstream: UpstreamCases | None = Field(default=None)


def read_proof(path: Path) -> Proof:
    """The proof in a file.

    Raises:
        VerifyError: it is damaged.
    """
    remedy = "run nox -s verify again"
    return documents.read(Proof, path, error=VerifyError, remedy=remedy)

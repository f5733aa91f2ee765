"""A real signature of sigstore's, by GitHub Actions, as pypi-attestations' own sdist has it: checked without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pypi_attestations import Attestation

from scripts.base import layout
from scripts.base.errors import WheelError
from scripts.base.layout import cache
from scripts.source import matrix, sdist
from scripts.wheels.trust import signing

pytestmark = pytest.mark.network

PIN = matrix.load(layout.MATRIX).upstream.model_copy(
    update={
        "distribution": "pypi-attestations",
        "version": "0.0.30",
        "sdist_sha256": "14ff13c76bbef02a483c2b77532da02bfd746b5141b881f355e06b9807434423",
    }
)
SIGNER = (
    "https://github.com/trailofbits/pypi-attestations/.github/workflows/release.yml@refs/tags/v0.0.19 "
    "(https://token.actions.githubusercontent.com)"
)


@pytest.fixture(scope="module")
def signed() -> Attestation:
    archive = sdist.fetched(PIN, cache("sdist"))
    name = "test/assets/pypi_attestations-0.0.19.tar.gz.slsa.attestation"
    return Attestation.model_validate_json(sdist.read(archive, name))


def written(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "x.whl.slsa.attestation"
    path.write_text(Attestation.model_validate_json(json.dumps(document)).model_dump_json() + "\n")
    return path


def test_a_good_signature_tells_who_signed(signed: Attestation, tmp_path: Path) -> None:
    path = written(tmp_path, json.loads(signed.model_dump_json()))
    assert signing.check(path, signed.envelope.statement) == SIGNER


def other(text: str) -> str:
    """The same base64 with one other byte in its middle."""
    middle = len(text) // 2
    return text[:middle] + ("A" if text[middle] != "A" else "B") + text[middle + 1 :]


def change(document: dict[str, Any], *keys: str | int) -> None:
    for key in keys[:-1]:
        document = document[key]  # type: ignore[index]
    document[keys[-1]] = other(document[keys[-1]])  # type: ignore[index]


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "signature": lambda d: change(d, "envelope", "signature"),
    "certificate": lambda d: change(d, "verification_material", "certificate"),
    "log's entry": lambda d: change(
        d, "verification_material", "transparency_entries", 0, "canonicalizedBody"
    ),
    "log's promise": lambda d: change(
        d,
        "verification_material",
        "transparency_entries",
        0,
        "inclusionPromise",
        "signedEntryTimestamp",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_signature_with_another_byte_is_refused(signed: Attestation, tmp_path: Path, what: str) -> None:
    document = json.loads(signed.model_dump_json())
    CHANGES[what](document)
    path = written(tmp_path, document)
    with pytest.raises(WheelError, match=r"x\.whl\.slsa\.attestation: its signature does not hold"):
        signing.check(path, signed.envelope.statement)


def test_a_good_signature_of_another_statement_is_refused(signed: Attestation, tmp_path: Path) -> None:
    path = written(tmp_path, json.loads(signed.model_dump_json()))
    with pytest.raises(WheelError, match="is of another wheel or proof"):
        signing.check(path, signed.envelope.statement + b" ")

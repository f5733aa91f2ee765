"""Signed statements: what is refused. A good signature needs an identity, which no test has."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import re
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pypi_attestations import Attestation

from scripts.base.errors import ToolchainError, UsageError, WheelError
from scripts.wheels.trust import companions, evidence, signing
from tests.unit.conftest import Command, whole_wheel


def self_signed(statement: bytes) -> str:
    """An attestation as PEP 740 has it, by a certificate that nobody stands for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "somebody")])
    now = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    document = {
        "version": 1,
        "verification_material": {
            "certificate": base64.b64encode(der).decode(),
            "transparency_entries": [{"logIndex": "1"}],
        },
        "envelope": {
            "statement": base64.b64encode(statement).decode(),
            "signature": base64.b64encode(key.sign(statement, ec.ECDSA(hashes.SHA256()))).decode(),
        },
    }
    return Attestation.model_validate_json(json.dumps(document)).model_dump_json() + "\n"


def test_a_signature_that_nobody_stands_for_is_refused_by_its_file(tmp_path: Path) -> None:
    wheel = whole_wheel(tmp_path)
    attestation = companions.provenance_attestation(wheel)
    attestation.write_text(self_signed(companions.provenance(wheel).read_bytes()))
    with pytest.raises(WheelError, match=r"\.whl\.slsa\.attestation: its signature does not hold: "):
        evidence.check(wheel)


def test_a_signature_of_another_statement_is_refused_by_its_file(tmp_path: Path) -> None:
    wheel = whole_wheel(tmp_path)
    attestation = companions.provenance_attestation(wheel)
    attestation.write_text(self_signed(companions.provenance(wheel).read_bytes() + b" "))
    with pytest.raises(WheelError, match=r"\.whl\.slsa\.attestation is of another wheel or proof"):
        evidence.check(wheel)


@pytest.mark.parametrize(
    ("flaw", "said"), [("{}", "is damaged"), ("not json", "is damaged"), ("space", "was changed since")]
)
def test_a_damaged_attestation_is_refused_by_its_file(tmp_path: Path, flaw: str, said: str) -> None:
    wheel = whole_wheel(tmp_path)
    attestation = companions.provenance_attestation(wheel)
    text = self_signed(companions.provenance(wheel).read_bytes())
    attestation.write_text(text + " " if flaw == "space" else flaw)
    with pytest.raises(WheelError, match=rf"\.whl\.slsa\.attestation {said}"):
        evidence.check(wheel)


def test_without_a_network_sign_says_so_and_leaves_no_attestation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    wheel = whole_wheel(tmp_path)
    with pytest.raises(
        UsageError, match=r"provenance\.json was not signed: .*without --sign nothing is signed"
    ):
        evidence.attest_build(wheel, sign=True)
    assert not companions.provenance_attestation(wheel).exists()


def test_without_an_identity_sign_says_who_may_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITLAB_CI", "CIRCLECI", "BUILDKITE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(UsageError, match="nobody is here to sign"):
        signing._identity("https://issuer.invalid")


def test_without_the_libraries_the_error_names_the_one_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = whole_wheel(tmp_path)
    companions.provenance_attestation(wheel).write_text("{}")
    monkeypatch.setitem(sys.modules, "sigstore", None)
    with pytest.raises(ToolchainError, match="sigstore is not installed: run this through nox"):
        evidence.check(wheel)


def test_nothing_is_signed_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "sign", lambda *_: pytest.fail("it was signed"))
    wheel = whole_wheel(tmp_path)
    evidence.attest_build(wheel)
    assert not companions.provenance_attestation(wheel).exists()


@pytest.mark.parametrize(
    "words",
    [
        ["build", "--sign", "--stock"],
        ["build", "--sign", "--kernels-only"],
        ["verify", "--sign", "--pytest=-k"],
    ],
)
def test_sign_is_refused_where_there_is_nothing_to_sign(command: Command, words: list[str]) -> None:
    done = command(*words)
    assert done.status == UsageError.exit_code
    assert re.search("--sign (is|and --attest are) for", done.err)

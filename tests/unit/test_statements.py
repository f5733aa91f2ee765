"""The statements about a wheel are what in-toto's own definitions allow, and say what the wheel says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
from in_toto_attestation.v1.statement import Statement

from scripts.wheels.trust import companions, evidence
from tests.unit.conftest import FACTS, whole_wheel
from tests.unit.test_trust import prove


def valid(content: bytes) -> dict[str, Any]:
    """A statement, once in-toto's library has taken it."""
    document: dict[str, Any] = json.loads(content)
    taken = Statement([], document["predicateType"], document["predicate"])
    json_format.ParseDict(document, taken.pb)
    taken.validate()
    return document


def test_the_provenance_names_all_that_went_into_the_wheel(tmp_path: Path) -> None:
    own = {"csrc/flash_attn/src/fork.h": "3" * 64}
    wheel = whole_wheel(tmp_path, facts={**FACTS, "series": {**FACTS["series"], "own_files": own}})
    document = valid(companions.provenance(wheel).read_bytes())
    json_format.ParseDict(document["predicate"], provenance_pb2.Provenance())
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    assert document["subject"] == [{"name": wheel.name, "digest": {"sha256": evidence.whole(wheel).sha256}}]
    built = document["predicate"]["buildDefinition"]
    assert built["externalParameters"]["target"] == FACTS["target"]
    assert built["internalParameters"]["nvcc"] == FACTS["nvcc"]
    materials = [(m["name"], m.get("digest", m.get("uri"))) for m in built["resolvedDependencies"]]
    assert materials == [
        ("upstream", {"sha256": "c" * 64}),
        ("upstream", {"gitCommit": "a" * 40}),
        ("cutlass", {"gitCommit": "b" * 40}),
        ("series", {"sha256": "d" * 64, "gitCommit": "f" * 40}),
        ("One.patch", {"sha256": "1" * 64}),
        ("Two.patch", {"sha256": "2" * 64}),
        ("csrc/flash_attn/src/fork.h", {"sha256": "3" * 64}),
        ("nvcc", "pkg:generic/nvcc@13.0.88"),
        ("g++", "pkg:generic/g%2B%2B@12.2.0"),
    ]


def test_what_nobody_has_looked_up_is_left_out(tmp_path: Path) -> None:
    upstream = {"version": "4.0.0b36", "commit": "unknown", "sdist_sha256": "c" * 64}
    facts = {**FACTS, "upstream": upstream, "torch": ""}
    document = valid(companions.provenance(whole_wheel(tmp_path, facts=facts)).read_bytes())
    named = [m["name"] for m in document["predicate"]["buildDefinition"]["resolvedDependencies"]]
    assert named == ["upstream", "series", "One.patch", "Two.patch", "nvcc", "g++"]


@pytest.mark.parametrize(
    ("told", "result"),
    [
        ({}, "PASSED"),
        ({"verified": False, "counts": {"not run": 1}, "gpu": None}, "WARNED"),
        (
            {"verified": False, "counts": {"failed": 1}, "cases": {"test_b": {"outcome": "failed"}}},
            "FAILED",
        ),
    ],
)
def test_the_statement_of_a_proof_is_about_the_wheel(
    tmp_path: Path, told: dict[str, Any], result: str
) -> None:
    wheel = whole_wheel(tmp_path)
    prove(wheel, **told)
    evidence.attest_proof(wheel)
    document = valid(companions.proof_statement(wheel).read_bytes())
    json_format.ParseDict(document["predicate"], test_result_pb2.TestResult())
    assert document["subject"] == [{"name": wheel.name, "digest": {"sha256": evidence.whole(wheel).sha256}}]
    assert document["predicate"]["result"] == result
    assert document["predicate"]["failedTests"] == [*told.get("cases", {})]

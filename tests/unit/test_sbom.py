"""The SBOM of a wheel: valid by CycloneDX's own schema, the same twice, and made of what the wheel says."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts.base import sealed
from scripts.wheels.trust import evidence, sbom
from tests.unit.conftest import FACTS, VERSION, whole_wheel

OWN = {"csrc/flash_attn/src/fork.h": "3" * 64}
TOLD = sealed.seal({**FACTS, "series": {**FACTS["series"], "own_files": OWN}})
NEEDED = ["libc.so.6", "libtvm_ffi.so"]


def bom() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(sbom.render("flash-attn", VERSION, TOLD, NEEDED))
    return document


@pytest.mark.parametrize(
    "facts", [FACTS, {k: v for k, v in FACTS.items() if k in ("format", "upstream", "series")}]
)
def test_cyclonedx_s_own_schema_takes_it(facts: dict[str, Any]) -> None:
    content = sbom.render("flash-attn", VERSION, sealed.seal(facts), NEEDED)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(content.decode()) is None


def test_it_names_upstream_every_patch_the_compilers_and_the_libraries() -> None:
    document = bom()
    wheel = document["metadata"]["component"]
    (upstream,) = wheel["pedigree"]["ancestors"]
    assert (wheel["purl"], wheel["version"]) == (
        f"pkg:pypi/flash-attn@{VERSION.replace('+', '%2B')}",
        VERSION,
    )
    assert upstream["hashes"] == [{"alg": "SHA-256", "content": "c" * 64}]
    assert upstream["externalReferences"][0]["comment"] == f"commit {'a' * 40}"
    assert [commit["uid"] for commit in wheel["pedigree"]["commits"]] == ["a" * 40]
    patches = {patch["diff"]["url"]: patch for patch in wheel["pedigree"]["patches"]}
    assert {name: patch["type"] for name, patch in patches.items()} == {
        "One.patch": "unofficial",
        "Two.patch": "backport",
    }
    (told,) = patches["Two.patch"]["resolves"]
    assert told["name"] == "Two"
    assert told["description"].splitlines() == ["Upstream-Status: Backport [abc]", f"sha256: {'2' * 64}"]
    named = {c["bom-ref"]: c.get("version") for c in document["components"]}
    assert named == {
        "compiler:nvcc": "13.0.88",
        "compiler:g++": "12.2.0",
        "headers:cutlass": "b" * 40,
        "headers:apache-tvm-ffi": "0.1.15.post2",
        "dynamic:libc.so.6": None,
        "dynamic:libtvm_ffi.so": None,
        "static:libgcc.a": None,
        **{f"own:{name}": None for name in OWN},
    }
    hashes = {c["name"]: c["hashes"] for c in document["components"] if c["bom-ref"].startswith("own:")}
    assert hashes == {name: [{"alg": "SHA-256", "content": sha256}] for name, sha256 in OWN.items()}


def test_it_is_the_same_at_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time but the date of the wheel's entries, and no random number."""
    first = sbom.render("flash-attn", VERSION, TOLD, NEEDED)
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        assert sbom.render("flash-attn", VERSION, TOLD, NEEDED) == first
    finally:
        monkeypatch.undo()
        time.tzset()
    assert bom()["metadata"]["timestamp"] == "2025-01-01T00:00:00+00:00"
    assert bom()["serialNumber"] == sbom.serial(bom())


def test_it_lies_in_the_wheel_where_pep_770_says(tmp_path: Path) -> None:
    wheel = evidence.whole(whole_wheel(tmp_path))
    assert [*wheel.sboms] == [f"flash_attn-{VERSION}.dist-info/sboms/flash_attn.cdx.json"]


def test_one_of_another_provenance_is_not_the_wheel_s() -> None:
    content = sbom.render("flash-attn", VERSION, TOLD, NEEDED)
    assert sbom.flaw(content, TOLD) == ""
    other = sealed.seal({**FACTS, "torch": "2.12.0"})
    assert sbom.flaw(content, other) == "is of another _fork.json than the wheel's"
    assert "its serial number" in sbom.flaw(content.replace(b"12.2.0", b"12.3.0"), TOLD)
    assert "not written as" in sbom.flaw(content + b" ", TOLD)
    assert "is no JSON" in sbom.flaw(b"{", TOLD)

"""In-toto statements about a wheel: how it was built (SLSA provenance v1), and what its suite found.

Each follows from the wheel and its proof alone, so it can be made again and compared byte for byte. Neither
is signed; ``scripts/wheels/trust/signing`` signs the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packageurl import PackageURL

from scripts.base import sealed
from scripts.wheels.trust import sbom

if TYPE_CHECKING:
    from scripts.wheels.trust.contents import Contents
    from scripts.wheels.trust.models import Proof

STATEMENT = "https://in-toto.io/Statement/v1"
SLSA_PROVENANCE = "https://slsa.dev/provenance/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
BUILD_TYPE = "urn:flash-attention-deterministic:wheel:1"
BUILDER = "urn:flash-attention-deterministic:nox-build"
_CHOICES = ("target", "kernel_set", "architectures", "attn_bias", "cuda", "tvm_ffi")
_FLAGS = ("nvcc", "cxx", "static_libraries")


def provenance(wheel: Contents) -> bytes:
    """How a wheel was built: what was asked for, and what it was made of."""
    facts = wheel.facts
    asked = {
        "distribution": wheel.distribution,
        "version": wheel.version,
        "tags": list(wheel.tags),
        "upstream": facts["upstream"]["version"],
        "revision": facts["fork_revision"],
        **{key: facts[key] for key in _CHOICES if key in facts},
    }
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": asked,
            "internalParameters": {key: facts[key] for key in _FLAGS if key in facts},
            "resolvedDependencies": _materials(wheel),
        },
        "runDetails": {"builder": {"id": BUILDER}},
    }
    return _statement(wheel, SLSA_PROVENANCE, predicate)


def proof(wheel: Contents, proof: Proof, sha256: str) -> bytes:
    """What a wheel's suite found.

    Args:
        wheel: which was proved.
        proof: what the suite left.
        sha256: of the proof's file.
    """
    failed = proof.counts.get("failed", 0)
    gpu = None if proof.gpu is None else proof.gpu.model_dump(mode="json")
    found = {
        "name": "proof",
        "digest": {"sha256": sha256},
        "mediaType": "application/json",
        "annotations": {
            "counts": proof.counts,
            "gpu": gpu,
            "torch": proof.torch,
            "python": proof.python,
        },
    }
    series = {"name": "series", "digest": {"sha256": wheel.provenance.series.digest}}
    predicate = {
        "result": "PASSED" if proof.verified else "FAILED" if failed else "WARNED",
        "configuration": [found, series],
        "failedTests": [name for name, case in proof.cases.items() if case.outcome == "failed"],
    }
    return _statement(wheel, TEST_RESULT, predicate)


def _statement(wheel: Contents, kind: str, predicate: dict[str, Any]) -> bytes:
    subject = {"name": wheel.path.name, "digest": {"sha256": wheel.sha256}}
    return sealed.render(
        {"_type": STATEMENT, "subject": [subject], "predicateType": kind, "predicate": predicate}
    )


def _materials(wheel: Contents) -> list[dict[str, Any]]:
    """Upstream's release, cutlass, the series and its patches, and the compilers."""
    facts = wheel.facts
    pin, series = facts["upstream"], facts["series"]
    release = PackageURL("pypi", name=wheel.distribution, version=pin["version"])
    made = [
        {"name": "upstream", "uri": str(release), "digest": {"sha256": pin["sdist_sha256"]}},
        {"name": "upstream", "uri": f"git+{sbom.REPOSITORY}", "digest": {"gitCommit": pin["commit"]}},
        {"name": "cutlass", "uri": f"git+{sbom.CUTLASS}", "digest": {"gitCommit": pin.get("cutlass", "")}},
        {"name": "series", "digest": {"sha256": series["digest"], "gitCommit": series["commit"]}},
        *({"name": patch["name"], "digest": {"sha256": patch["sha256"]}} for patch in series["patches"]),
        *(
            {"name": name, "digest": {"sha256": sha256}}
            for name, sha256 in series.get("own_files", {}).items()
        ),
        *(
            {
                "name": name,
                "uri": str(PackageURL("generic", name=name, version=sbom.release(version))),
                "annotations": {"version": version},
            }
            for name, version in sbom.compilers(facts)
        ),
    ]
    return [entry for entry in made if not {"", "unknown"} & {*entry.get("digest", {}).values()}]

"""Upstream's own tests, a drawn part of them, with the mode off and on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import upstream_cases
from harness import KERNELS

CASES = 40  # of each of upstream's tests

pytestmark = pytest.mark.gpu


def test_upstreams_cases_pass(request: pytest.FixtureRequest, tmp_path: Path, entry: dict[str, Any]) -> None:
    named = request.config.getoption("--upstream")
    if named is None:
        pytest.skip("not run: no --upstream FILE, tests/test_flash_attn.py of flash-attention's release")
    if all(upstream_cases.needed(dim, dtype) - KERNELS for dim in upstream_cases.DIMS for dtype in ("fp16", "bf16")):
        pytest.skip("this wheel has not all passes of any head dim and dtype")
    file = Path(named).resolve()
    choice = upstream_cases.Choice(request.config.getoption("--upstream-cases") or CASES, KERNELS)
    found = upstream_cases.run(file, choice, tmp_path)
    failed = {case: of_case for case, of_case in found.items() if any(outcome.startswith("failed") for outcome in of_case.values())}
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    entry["upstream"] = {"sha256": digest, "cases": len(found), "counts": upstream_cases.counts(found), "failed": failed}
    assert found, "none of upstream's tests has a case for these kernels"
    assert failed == {}

"""Upstream's own tests, a drawn part of them, with the mode off and on."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import upstream_cases
from harness import KERNELS

pytestmark = pytest.mark.gpu


def test_upstreams_cases_pass(request: pytest.FixtureRequest, tmp_path: Path, entry: dict[str, Any]) -> None:
    named = request.config.getoption("--upstream")
    if named is None:
        pytest.skip("not run: no --upstream FILE, tests/test_flash_attn.py of flash-attention's release")
    if not upstream_cases.any_whole(KERNELS):
        pytest.skip("this wheel has not all passes of any head dim and dtype")
    file = Path(named).resolve()
    choice = upstream_cases.Choice(request.config.getoption("--upstream-cases"), KERNELS)
    found = upstream_cases.run(file, choice, tmp_path)
    assert found, "none of upstream's tests has a case for these kernels"
    failed, counts = upstream_cases.failures(found), upstream_cases.counts(found)
    if failed and (stock := request.config.getoption("--stock")) is not None:
        again = upstream_cases.run(file, replace(choice, only=frozenset(failed), stock=Path(stock)), tmp_path)
        failed = {case: {**of_case, **again[case]} for case, of_case in failed.items()}
    on_stock_too = {
        case: of_case for case, of_case in failed.items() if upstream_cases.is_upstreams_own(of_case)
    }
    own = {case: of_case for case, of_case in failed.items() if case not in on_stock_too}
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    entry["upstream"] = {
        "sha256": digest,
        "cases": len(found),
        "counts": counts,
        "failed": own,
        "fails on stock too": on_stock_too,
    }
    assert own == {}

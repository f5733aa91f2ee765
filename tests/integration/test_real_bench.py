"""Upstream's own setup.py and this build system compile the same kernel file; the figures are theirs."""

from __future__ import annotations

import json

import pytest

from tests.integration.wheels import KERNELS, ROOT, said

pytestmark = [pytest.mark.network, pytest.mark.nvcc]


@pytest.mark.in_turn(4)
def test_building_is_measured_beside_upstream_s_setup_py() -> None:
    there = set(ROOT.glob("build/bench/*"))
    told = json.loads(said("bench", "build", "--kernels", KERNELS, "--source", "sdist", "--json"))
    ours, theirs = told["ours"], told["upstream"]
    # One real kernel file takes tens of seconds on each side: one that compiled nothing, or another file, would be far off.
    # Goals are for the command: the seconds for masks and biases were 1.00, 1.04 and 1.19 times those without in three runs.
    (name,) = ours["kernels"]
    assert 0.3 < ours["kernels"][name] / theirs["kernels"][name] < 2
    assert theirs["kernels"][name] > 10
    assert ours["deflated_bytes"] < theirs["deflated_bytes"]
    figures = {line["what"]: line for line in told["figures"]}
    assert figures["flash_api.cpp changed: kernel files compiled"]["met"]
    assert figures["a further torch or Python, installed"]["met"]
    assert 0.5 < figures["nvcc, for masks and biases"]["value"] < 2
    assert set(ROOT.glob("build/bench/*")) == there

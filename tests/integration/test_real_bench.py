"""Upstream's own setup.py and this build system compile the same kernel file; the figures are theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.in_turn(0)
def test_building_is_measured_beside_upstream_s_setup_py() -> None:
    there = set(ROOT.glob("build/bench/*"))
    command = [
        sys.executable,
        "-m",
        "scripts",
        "bench",
        "build",
        "--kernels",
        "hdim32,fp16,fwd,causal",
        "--source",
        "sdist",
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    ours, theirs = told["ours"], told["upstream"]
    # One real kernel file takes tens of seconds on both sides; a side that compiled nothing, or another file, would not be near.
    (name,) = ours["kernels"]
    assert 0.3 < ours["kernels"][name] / theirs["kernels"][name] < 2
    assert theirs["kernels"][name] > 10
    assert ours["deflated_bytes"] < theirs["deflated_bytes"]
    met = {line["what"]: line["met"] for line in told["figures"]}
    assert met["flash_api.cpp changed: kernel files compiled"]
    assert met["a further torch or Python, installed"]
    assert met["nvcc, for masks and biases"]
    assert set(ROOT.glob("build/bench/*")) == there

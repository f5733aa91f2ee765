"""The benchmark's calls, on small problems: what they are given, and that none fails. Times and memory are nothing here."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import bench
import flash_attn_2_cuda
import pytest
import timing
import torch
from conftest import DIM
from harness import KERNELS, Config


class Clock:
    ticks = itertools.count(1.0)

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = next(self.ticks)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Clock) -> float:
        return other.at - self.at


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    monkeypatch.setattr(bench, "one_block_fits", lambda _: True)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(bench, "tensor", lambda *shape: torch.randn(shape).half())
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **k: full(*a, **(k | {"device": "cpu"})))
    sizes = {
        "PREFILL": ((1, 96),),
        "LENGTHS": (64,),
        "CHUNKED": (300,),
        "DECODE": ((2, 600),),
        "DRAFTS": ((2, 600),),
        "GROUPS": (2,),
        "EVEN": ((1, 64, 1024, True),),
    }
    for name, value in (sizes | {"TOKENS": 64, "NEW": 64, "MILLION": 1024, "HEADS": (2, 1)}).items():
        assert hasattr(bench, name)
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(timing, "FEWEST", 1)
    monkeypatch.setattr(bench, "load", lambda _: flash_attn_2_cuda)


@pytest.mark.usefixtures("small")
def test_every_group_runs_and_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Config(head_dim=DIM, causal=True).need("fwd", "split", "bwd")
    path = tmp_path / "bench.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["bench.py", "--json", str(path), "--stock", "stock.so", "--head-dim", str(DIM), "--seconds", "0"],
    )
    bench.main()
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert {row["group"] for row in facts["rows"]} == set(bench.NEEDED)
    for group in bench.NEEDED:
        found = {row["variant"] for row in facts["rows"] if row["group"] == group}
        assert {"stock", "off", "on"} <= found, group
    assert all(row["ratio"] > 0 for row in facts["rows"])
    assert [b["differing"] for b in facts["bits"]] == [0] * 5  # one arithmetic, whatever the path


@pytest.mark.usefixtures("small")
def test_head_dims_that_the_wheel_lacks_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    absent = next(d for d in (256, 192, 128, 96, 64) if not any(f"_hdim{d}_" in name for name in KERNELS))
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "bench.py",
            "--json",
            str(path),
            "--stock",
            "stock.so",
            "--head-dim",
            str(absent),
            "--group",
            "prefill",
            "backward",
        ],
    )
    bench.main()
    assert json.loads(path.read_text(encoding="utf-8"))["rows"] == []
    assert (
        f"backward d{absent}: this wheel has no bwd_hdim{absent}_fp16, bwd_hdim{absent}_fp16_causal, split_hdim{absent}_fp16"
        in capsys.readouterr().out
    )

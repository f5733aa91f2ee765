"""Some of upstream's own tests, on emulated kernels."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import upstream_cases
from conftest import HALF_NAME
from harness import KERNELS

CASES, LONGEST = 2, 260  # of each of upstream's tests, and of their sequences
SHARES = 4  # of upstream's tests, for processes side by side
TESTS = Path(os.environ["FORK_UPSTREAM_TESTS"])
# What upstream's file needs of a GPU.
STAND_INS = """
from types import SimpleNamespace
import flash_attn.layers.rotary as rotary
import torch
import conftest  # of tests/emulator: the operators on CPU tensors

def turned(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    starts = seqlen_offsets if isinstance(seqlen_offsets, torch.Tensor) else [seqlen_offsets] * len(x)
    own = [rotary.apply_rotary_emb_torch(row[None].float(), *(t[start : start + len(row)].float() for t in (cos, sin)), interleaved) for row, start in zip(x, starts)]
    return torch.cat(own).to(x.dtype)

rotary.apply_rotary_emb = turned
torch.cuda.get_device_capability = lambda *device: (9, 0)
torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=2**36)
"""


def on_cpu(file: Path, folder: Path, share: int) -> Path:
    """A share of upstream's file with CPU tensors, which the emulator takes for a GPU's."""
    target = folder / file.name
    text = file.read_text(encoding="utf-8")
    names = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    own = sorted({*names} - {"test_flash_attn_race_condition"})[
        share::SHARES
    ]  # that one runs each case 250 times
    others = f"\ndel {', '.join(sorted({*names} - {*own}))}\n"
    target.write_text(STAND_INS + text.replace('"cuda"', '"cpu"') + others, encoding="utf-8")
    return target


@pytest.mark.parametrize("share", range(SHARES))
def test_upstreams_cases_pass(share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    if not upstream_cases.any_whole(KERNELS):
        pytest.skip("built without some of the kernels (--kernels)")
    found = upstream_cases.run(
        on_cpu(TESTS, tmp_path, share), upstream_cases.Choice(CASES, KERNELS, LONGEST), tmp_path
    )
    counts = upstream_cases.counts(found)
    assert upstream_cases.failures(found) == {}
    assert counts["off"] == counts["on"]
    assert counts["off"]["passed"] >= 2
    assert len({case.partition("[")[0] for case in found}) >= (
        2 if HALF_NAME == "fp16" else 1
    )  # not every test has cases of each head dim and dtype

"""Figures of FlashAttention-4's kernels: how they are read, held against goals and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.base.errors import UsageError
from scripts.lab import fa4_figures

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    ("prefill", "4x2048 full", {"off": 1.0, "on 2048": 1.02, "on 512": 1.2}),
    ("prefill", "8x4096 full", {"off": 2.0, "on 2048": 2.2, "on 512": 2.2}),
    ("backward", "4x2048 causal", {"off, deterministic": 1.2, "off": 1.0, "on": 1.1}),
    ("decode", "1x131072", {"off": 7.0, "on 2048": 1.0, "cuDNN": 0.8, "flash_attn, on 2048": 0.5}),
    ("chunked", "1x512 on 16384", {"off": 1.0, "on 2048": 0.9, "on 512": 0.8}),
]


def written(folder: Path, rows: list[tuple[str, str, dict[str, float]]] = ROWS, **more: object) -> Path:
    told = [
        {"group": group, "head_dim": 64, "case": case, "variant": variant, "ms": ms}
        for group, case, variants in rows
        for variant, ms in variants.items()
    ]
    path = folder / "figures.json"
    path.write_text(json.dumps({"format": 1, "gpu": "a GPU", "torch": "2.11.0", "rows": told, **more}))
    return path


def test_goals_hold_the_mode_against_the_best_of_others(tmp_path: Path) -> None:
    goals = {goal.what: goal for goal in fa4_figures.goals(fa4_figures.read(written(tmp_path)))}
    at_64 = {what.removeprefix("D 64: "): goal for what, goal in goals.items() if what.startswith("D 64: ")}
    assert at_64["prefill, over the mode off: the worst"].value == pytest.approx(1.1)
    assert at_64["prefill, over the mode off: geometric mean"].value == pytest.approx((1.02 * 1.1) ** 0.5)
    assert at_64["prefill, split_size 512: geometric mean"].value == pytest.approx((1.2 * 1.1) ** 0.5)
    assert at_64["backward, causal, over atomics: the worst"].met is True
    assert at_64["decode, over the best of all: the worst"].value == pytest.approx(2.0)
    assert at_64["decode of 1 on 131072 keys, faster than one split"].value == pytest.approx(7.0)
    new_tokens = at_64["512 new tokens on a cache, over the best of all: the worst"]
    assert new_tokens.value == pytest.approx(0.9), "the mode is no peer of its own"
    assert new_tokens.met is True
    assert {goal.met for what, goal in goals.items() if what.startswith("D 128: ")} == {None}


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"figures\.json.*format.*tests/wheel4/bench.py --json wrote"):
        fa4_figures.read(written(tmp_path, format=2))


def test_the_picture_in_the_documents_is_that_of_their_figures(tmp_path: Path) -> None:
    fa4_figures.draw(fa4_figures.read(ROOT / "docs/bench-fa4.json"), tmp_path / "bench-fa4.svg")
    drawn, kept = (path.read_text() for path in (tmp_path / "bench-fa4.svg", ROOT / "docs/bench-fa4.svg"))
    assert drawn.count("<use") == kept.count("<use") > 50

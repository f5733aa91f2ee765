"""Whose turn it is, where each run takes a part of what would take too long: by the number of commits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TURNS = 10  # of tests marked in_turn
# Files that compile nothing in this clone's build/, so that they run beside all others. Those take it in turn anyway,
# and some delete objects there.
APART = {
    *("test_index_in_browser", "test_real_cluster", "test_real_coexistence", "test_real_head_dims"),
    *("test_real_index", "test_real_inlining", "test_real_python_wheel", "test_real_remote_cache"),
    *("test_real_series", "test_real_signature", "test_real_tidy", "test_real_upstream", "test_real_walk"),
    *("test_reproducible", "test_slow_machine"),
}


def turn(of: int) -> int:
    """From 0 to ``of`` - 1.

    Raises:
        RuntimeError: a shallow clone, which would always say the same.
    """
    if _git("rev-parse", "--is-shallow-repository") == "true":
        raise RuntimeError("a shallow clone has no turns: git fetch --unshallow, or take --every-turn")
    return int(_git("rev-list", "--count", "HEAD")) % of


def parts(turns: list[int]) -> pytest.MarkDecorator:
    """Cases ``part``, such as ``2/5``, of a suite that takes such a word: the part of each of these turns."""
    taken = [
        pytest.param(f"{at}/{len(turns)}", marks=pytest.mark.in_turn(own)) for at, own in enumerate(turns, 1)
    ]
    return pytest.mark.parametrize("part", taken)


def lane(name: str) -> str:
    """Of a test: its file, which one process runs; and those that are not apart are one."""
    file = name.partition("::")[0]
    return file if Path(file).stem in APART else "in this clone"


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()

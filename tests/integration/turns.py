"""Whose turn it is, where each run takes a part of what would take too long: by the number of commits."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TURNS = 6  # of tests marked in_turn, of the long cases of tests/emulator, and of the GPU half of tests/wheel4


def turn(of: int) -> int:
    """From 0 to ``of`` - 1.

    Raises:
        RuntimeError: a shallow clone, which would always say the same.
    """
    if _git("rev-parse", "--is-shallow-repository") == "true":
        raise RuntimeError("a shallow clone has no turns: git fetch --unshallow, or take --every-turn")
    return int(_git("rev-list", "--count", "HEAD")) % of


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()

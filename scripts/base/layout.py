"""Where things lie: this repository's parts, what it builds, and the user's cache, which all clones share."""

from __future__ import annotations

from pathlib import Path

import platformdirs

ROOT = Path(__file__).resolve().parents[2]
MATRIX, PATCHES, UPSTREAM = ROOT / "wheel_matrix.toml", ROOT / "patches", ROOT / "upstream"
BUILD, SOURCE, DIST = ROOT / "build", ROOT / "build/source", ROOT / "dist"


def cache(part: str) -> Path:
    """Where this user keeps what every clone can share: ``sdist``, ``toolkit`` and the like."""
    return Path(platformdirs.user_cache_dir("flash-attention-deterministic")) / part

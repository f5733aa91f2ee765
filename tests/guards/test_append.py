from __future__ import annotations

import hashlib
from pathlib import Path

# Upstream's rotary embeddings, which fork_append.h makes anew, to the bit. Where a release changes them, it may
# have to follow: read the difference before the new digest is written here.
WRITTEN_ANEW = "f000eba29dade79f629849ed5dbce654d475d61826142a0f94011506be3d2427"


def test_upstream_turns_as_fork_append_does(tree: Path) -> None:
    rotary = tree / "csrc/flash_attn/src/rotary.h"
    assert hashlib.sha256(rotary.read_bytes()).hexdigest() == WRITTEN_ANEW

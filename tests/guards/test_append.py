from __future__ import annotations

import hashlib
from pathlib import Path

# What fork_append.h says again in its own way. Where upstream changes it, fork_append.h may have to follow.
WRITTEN_ANEW = "777e9c7bf3fdce5f6b6c3a069790b9746d192076d0c1199809511c51e26ad87b"


def test_upstream_appends_and_turns_as_fork_append_does(tree: Path) -> None:
    folder = tree / "csrc/flash_attn/src"
    kernel = (folder / "flash_fwd_kernel.h").read_text(encoding="utf-8")
    assert kernel.count("if constexpr (false && Append_KV) {") == 2
    _, keys, queries = kernel.split("if constexpr (false && Append_KV) {")
    text = (
        keys.split("// Read Q from gmem")[0]
        + queries.split("int n_block = ")[0]
        + (folder / "rotary.h").read_text(encoding="utf-8")
    )
    assert hashlib.sha256(text.encode()).hexdigest() == WRITTEN_ANEW

from __future__ import annotations

import hashlib
import re
from pathlib import Path

# Upstream's host code, which csrc/flash_attn/core says again without a framework. Where a release changes it,
# the core may have to follow: fork/flash-attn.toml says what to read before the new digest is written here.
SAID_AGAIN = "f26789c206a20b2e136d40fd51e1f9efd99d9f7877c522832d85482d88256a69"
FIRST, LAST = "void set_params_fprop(", "} // namespace FLASH_NAMESPACE"


def test_upstream_s_host_code_is_what_the_core_says_again(tree: Path) -> None:
    assert (tree / "csrc/flash_attn/core/forward.cpp").is_file()
    text = (tree / "csrc/flash_attn/flash_api.cpp").read_text(encoding="utf-8")
    text = text[text.index(FIRST) : text.index(LAST)]
    # The fork's one hook, which lets stock be built of some kernels.
    text = re.sub(r"FORK_LAUNCH\(\w+, (\w+), (.+)\);", r"\1<\2>(params, stream);", text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == SAID_AGAIN, (
        f"flash_api.cpp from {FIRST!r} to {LAST!r} is another text, of digest {digest}"
    )

"""The C interface and the Python functions give the same bits."""

from __future__ import annotations

import os
import subprocess
import sys

import native
import pytest
from flash_attn import cpp
from harness import Config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("named", "mode"), native.CHOSEN)
def test_both_give_the_same_bits(named: str, mode: str, dtype: str) -> None:
    native.assert_agree(native.Library(cpp.library()), named, mode, Config(dtype=dtype))


_SHARED = """
import native, torch
from flash_attn import cpp, set_deterministic_mode
set_deterministic_mode(True)
library = native.Library(cpp.library())
shape = (1, 32768, 32, 64)
given = {name: torch.randn(shape, device="cuda", dtype=torch.float16) for name in ("q", "k", "v", "out", "dout")}
given |= {name: torch.empty_like(given["q"]) for name in ("dq", "dk", "dv")}
given["lse"] = torch.zeros(1, 32, 32768, device="cuda")
size = library.workspace("backward", **given)
workspace = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
given |= {"workspace": workspace.data_ptr(), "workspace_size": size}
library.backward(**given)
blocks = 32768 // 128  # of queries in each head, and of keys that have all had their turn at each of those
at = (workspace == blocks).nonzero()
assert len(at) == 32 * blocks, len(at)
turns = workspace[at[0] : at[-1] + 1]
zeros = torch.zeros(len(turns), dtype=torch.int32).pin_memory()
other, end = torch.cuda.Stream(), torch.cuda.Event()
torch.cuda.synchronize()
library.backward(**given)
end.record()
with torch.cuda.stream(other):
    while not end.query():
        turns.copy_(zeros, non_blocking=True)
        other.synchronize()
print("the call came to its end")
"""


def test_a_wait_that_cannot_end_is_given_up_with_a_message() -> None:
    """Another stream writes to a call's workspace: turns that were passed on are awaited for ever."""
    Config().need("bwd")
    environment = {**os.environ, "FA2_WAIT_LIMIT": "5", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _SHARED], check=False, capture_output=True, text=True, env=environment
    )
    assert "the call came to its end" not in done.stdout
    assert "a thread block waited for a turn that does not come" in done.stdout + done.stderr, done.stderr
    assert "CUDA error" in done.stderr

"""The C interface and the Python functions give the same bits, on the interpreter's one GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import flash_attn_2_cuda
import native
import pytest
from conftest import built


@pytest.mark.parametrize(("named", "mode"), native.CHOSEN)
def test_both_give_the_same_bits(named: str, mode: str) -> None:
    library = native.Library(str(flash_attn_2_cuda._LIBRARY))
    native.assert_agree(library, named, mode, built())


CHECKED = """
import conftest, flash_attn_2_cuda, native, torch
library = native.Library(str(flash_attn_2_cuda._LIBRARY))
tensors = {name: torch.zeros(6, 2, conftest.DIM, dtype=conftest.HALF) for name in ("q", "k", "v", "out")}
sums = torch.tensor([0, 2, 6], dtype=torch.int32)
call = dict(tensors, cu_seqlens_q=sums, cu_seqlens_k=sums, max_seqlen_q=4, max_seqlen_k=4)
taken = library.workspace(**call)
place = torch.empty(taken + 256, dtype=torch.uint8)
at = (place.data_ptr() + 255) // 256 * 256
library.forward(**call, workspace=at, workspace_size=taken)
print(taken)
"""


def test_a_workspace_of_the_size_that_is_told_holds_what_the_check_of_tables_takes() -> None:
    """FA2_CHECK=1, which a process reads once."""
    taken = []
    for checks in ("0", "1"):
        run = [sys.executable, "-c", CHECKED]
        env = {**os.environ, "FA2_CHECK": checks, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        taken.append(int(done.stdout))
    assert taken[1] > taken[0]

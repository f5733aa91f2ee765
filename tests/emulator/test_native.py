"""The C interface and the Python functions give the same bits, on the interpreter's one GPU."""

from __future__ import annotations

import flash_attn_2_cuda
import native
import pytest
from conftest import built


@pytest.mark.parametrize(("named", "mode"), native.CHOSEN)
def test_both_give_the_same_bits(named: str, mode: str) -> None:
    library = native.Library(str(flash_attn_2_cuda._LIBRARY))
    native.assert_agree(library, named, mode, built())

"""The C interface and the Python functions give the same bits."""

from __future__ import annotations

import native
import pytest
from flash_attn import cpp
from harness import Config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("named", "mode"), native.CHOSEN)
def test_both_give_the_same_bits(named: str, mode: str, dtype: str) -> None:
    native.assert_agree(native.Library(cpp.library()), named, mode, Config(dtype=dtype))

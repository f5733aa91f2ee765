"""The rule of flash_attn.cute's windows, for all bounds: a negative one is no limit."""

from __future__ import annotations

import runpy

from hypothesis import given
from hypothesis import strategies as st

from scripts.base import layout

SIDES = runpy.run_path(str(layout.ROOT / "fork/flash-attn-4/flash_attn/cute/fork_window.py"))["sides"]
BOUNDS = st.one_of(st.none(), st.integers())


@given(left=BOUNDS, right=BOUNDS)
def test_a_negative_bound_is_no_limit_on_its_side_alone(left: int | None, right: int | None) -> None:
    found = SIDES(left, right)
    for given_side, side in zip((left, right), found, strict=True):
        assert side == (None if given_side is None or given_side < 0 else given_side)
    assert SIDES(*found) == found

"""Parts of a suite's cases."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

PARTS = runpy.run_path(str(Path(__file__).parents[1] / "wheel/parts.py"))


@given(st.integers(0, 50), st.integers(1, 9))
def test_each_case_is_in_one_part(count: int, parts: int) -> None:
    cases = list(range(count))
    taken = []
    for k in range(1, parts + 1):
        others = PARTS["left_out"](cases, PARTS["parse"](f"{k}/{parts}"))
        own = [case for case in cases if case not in others]
        assert abs(len(own) - count / parts) < 1
        taken += own
    assert sorted(taken) == cases


@pytest.mark.parametrize("words", ["", "2", "0/6", "7/6", "1/0", "-1/6", "1/6/6", "a/b"])
def test_what_is_no_part_is_refused(words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no part: name one as 2/6"):
        PARTS["parse"](words)


@pytest.mark.parametrize(("part", "left"), [(None, "abcd"), ((1, 2), "acd"), ((2, 2), "bcd")])
def test_what_is_not_divided_is_in_every_part(part: tuple[int, int] | None, left: str) -> None:
    gone: list[str] = []

    def note(*, items: list[str]) -> None:
        gone.extend(items)

    config = SimpleNamespace(getoption=lambda _: part, hook=SimpleNamespace(pytest_deselected=note))
    items = list("abcd")
    PARTS["deselect"](config, items, ["a", "b"])
    assert items == list(left)
    assert set(gone) == set("abcd").difference(left)

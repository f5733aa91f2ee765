"""A suite's cases in equal parts, for runs that take one each."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")


def parse(words: str) -> slice:
    """Which of N cases in a row are in part K of N, by ``K/N``.

    Raises:
        argparse.ArgumentTypeError: it is none of 1/N to N/N.
    """
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", words)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{words} is no part: name one as 2/6, the second of six")
    return slice(int(found[1]) - 1, None, int(found[2]))


def left_out(cases: Sequence[Case], part: slice) -> list[Case]:
    """The cases of the other parts."""
    taken = set(range(len(cases))[part])
    return [case for at, case in enumerate(cases) if at not in taken]

"""A suite's cases in equal parts, for runs that take one each."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")


def parse(words: str) -> tuple[int, int]:
    """K and N of ``K/N``: part K of N.

    Raises:
        argparse.ArgumentTypeError: it is none of 1/N to N/N.
    """
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", words)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{words} is no part: name one as 2/6, the second of six")
    return int(found[1]), int(found[2])


def left_out(cases: Sequence[Case], part: tuple[int, int]) -> list[Case]:
    """The cases of the other parts: part K has the Kth of each N."""
    which, of = part
    return [case for at, case in enumerate(cases, start=1) if (at - which) % of]

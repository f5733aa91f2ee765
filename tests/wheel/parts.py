"""A suite's cases in equal parts, for runs that take one each."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, TypeVar

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


def add_option(parser: Any, cases: str) -> None:
    """Add ``--part`` to pytest, which takes a part of these cases."""
    told = f"of {cases}, part K of N alone: 1/6 to 6/6 are all"
    parser.addoption("--part", metavar="K/N", type=parse, default=None, help=told)


def deselect(config: Any, items: list[Any], divided: list[Any]) -> None:
    """Leave to other runs what ``--part`` does not name of the divided items."""
    if (part := config.getoption("--part")) is not None:
        others = left_out(divided, part)
        gone = set(others)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=others)

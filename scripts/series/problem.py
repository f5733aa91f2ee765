"""A fault of a series: file, line, fix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - a dataclass holds it
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scripts.base.errors import SeriesError


@dataclass(frozen=True)
class Problem:
    """One fault."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        """As compilers and editors have it."""
        return f"{self.path}:{self.line}: {self.text}"


def as_problem(path: Path, error: SeriesError) -> Problem:
    """An error about a file, at the line that it names."""
    match = re.match(r".*?:(\d+): ", str(error))
    return (
        Problem(path, int(match[1]), str(error)[match.end() :])
        if match
        else Problem(path, 1, str(error).removeprefix(f"{path}: "))
    )

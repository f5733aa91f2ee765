"""Say what is wrong in a TOML file: by file, line and key."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from scripts.base.errors import MatrixError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from scripts.base.errors import BuildError


def line_of(text: str, location: Sequence[str | int]) -> int:
    r"""The line of a key, or of the last table or key on the way to it that the text has.

    >>> line_of('[a]\nx = 1\n[a.b]\ny = 2', ("a", "b", "y"))
    4
    >>> line_of('[a]\nx = 1', ("a", "z"))
    1
    """
    names = [str(part) for part in location if not isinstance(part, int)]
    lines = text.splitlines()
    best = 1
    for depth in range(len(names), 0, -1):
        sought = names[:depth]
        table: list[str] = []
        for number, line in enumerate(lines, 1):
            if header := re.match(r"\s*\[([^\[\]]+)\]", line):
                table = [
                    part.strip().strip("\"'") for part in re.findall(r'"[^"]*"|\'[^\']*\'|[^.\s]+', header[1])
                ]
                if table == sought:
                    return number
            elif (key := re.match(r"""\s*("[^"]*"|'[^']*'|[\w-]+)\s*=""", line)) and [
                *table,
                key[1].strip("\"'"),
            ] == sought:
                return number
    return best


def mistake_at(
    path: Path,
    text: str,
    location: Sequence[str | int],
    message: str,
    error: type[BuildError] = MatrixError,
) -> BuildError:
    """An error that names file, line and key."""
    key = ".".join(str(part) for part in location) or "the file"
    return error(f"{path}:{line_of(text, location)}: {key}: {message}")


def explain(details: Any, allowed: Iterable[str]) -> str:
    """What pydantic found wrong with a value, in our words."""
    kind, message = details["type"], details["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return f"unknown key; allowed are {', '.join(allowed)}"
    if kind == "missing":
        return "this key is missing"
    value = details["input"]
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and kind in ("string_type", "literal_error")
    ):
        return f'{message} (it is the number {value}; write "{value}", in quotes)'
    return message if repr(value) in message else f"{message} (it is {value!r})"

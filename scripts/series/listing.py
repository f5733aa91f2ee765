"""``series``: the order of the patches, one name a line, with comments after ``#``."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.base.errors import SeriesError

if TYPE_CHECKING:
    from pathlib import Path

LISTING = "series"


def text_of(path: Path) -> str:
    """A file's text; a SeriesError names the place where it is not UTF-8."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as e:
        raise SeriesError(_missing(path)) from e
    except OSError as e:
        raise SeriesError(f"{path}: {e.strerror}.") from e
    if content.startswith(codecs.BOM_UTF8):
        raise SeriesError(f"{path}:1: starts with a byte order mark; save the file as UTF-8 without one.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as e:
        line = content[: e.start].count(b"\n") + 1
        raise SeriesError(f"{path}:{line}: not UTF-8: {e.reason} (byte {content[e.start]:#04x}).") from e


def _missing(path: Path) -> str:
    """What to say of a file that is not there: a new upstream's is to be made, others to be restored."""
    back = f"Take it back (git checkout -- {path})"
    if path.name != LISTING or any(path.parent.glob("*.patch")):
        return f"{path}: no such file. {back}."
    make = f"mkdir -p {path.parent} && touch {path}"
    return (
        f"{path}: no such file. For a new upstream of wheel_matrix.toml, make its folder and an empty series "
        f"({make}; docs/maintaining.md, 'Add an upstream'). {back} where git has it."
    )


@dataclass(frozen=True)
class Entry:
    """One line of ``series`` that names a patch, with the comments that belong to it."""

    name: str
    line: int
    before: tuple[str, ...]  # the comment lines and empty lines above
    after: str  # a comment in the same line, with the space before it


def name_in(line: str) -> str:
    """The file name in a line of ``series``; empty for a comment."""
    return line.partition("#")[0].strip()


def read(folder: Path) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """The entries of ``series``, and the comments after the last."""
    path = folder / LISTING
    entries: list[Entry] = []
    above: list[str] = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        name = name_in(line)
        if not name:
            above.append(line.rstrip())
            continue
        if "/" in name or "\\" in name or not name.endswith(".patch"):
            raise SeriesError(
                f"{path}:{number}: {name!r} is no patch's file name; write one NAME.patch of {folder.name}/ "
                "a line, comments after '#'."
            )
        earlier = next((e for e in entries if e.name == name), None)
        if earlier:
            raise SeriesError(
                f"{path}:{number}: {name} is already named in line {earlier.line}; delete one of the two."
            )
        if not (folder / name).is_file():
            raise SeriesError(f"{path}:{number}: {folder / name} does not exist; add it, or delete the line.")
        after = line[line.index("#") :].rstrip() if "#" in line else ""
        entries.append(Entry(name, number, tuple(above), f"  {after}" if after else ""))
        above = []
    return tuple(entries), tuple(above)


def render(names: list[str], old: tuple[Entry, ...], footer: tuple[str, ...]) -> str:
    """``series`` for these names, with the comments of those that were there."""
    comments = {e.name: e for e in old}
    lines: list[str] = []
    for name in names:
        entry = comments.pop(name, None)
        lines += [*(entry.before if entry else ()), name + (entry.after if entry else "")]
    return "".join(line + "\n" for line in (*lines, *footer))

"""The features of a series, as ``fork/NAME.toml`` tells them of our own files in ``fork/NAME``.

Each of our own files belongs to one feature; a patch names its feature in a trailer. A feature also names
checks that hold of the whole tree, which no guard can be: they pass before any patch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping  # noqa: TC003 - a dataclass holds it
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path  # noqa: TC003 - a dataclass holds it
from typing import TYPE_CHECKING

from pydantic import Field, TypeAdapter, ValidationError

from scripts.base.errors import SeriesError
from scripts.series import listing
from scripts.source.matrix_tables import Table
from scripts.source.mistakes import explain, line_of, mistake_at

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Feature(Table):
    """One feature; its name is its table's."""

    title: str  # what it is, in a line
    text: str = ""  # what and why
    files: tuple[str, ...] = Field(default=(), strict=False)  # paths in the tree, or patterns; * takes / too
    tests: tuple[str, ...] = Field(default=(), strict=False)  # that prove it
    figures: str = ""
    holds: Mapping[str, str] = Field(default_factory=dict)  # a test of the tree; what to read where it fails


_ENTRIES = TypeAdapter(dict[str, Feature])


@dataclass(frozen=True)
class Features:
    """The table."""

    path: Path
    content: str
    entries: Mapping[str, Feature]

    def line(self, name: str, key: str = "", value: str = "") -> int:
        """The line of a feature, of a key of it, or of a text in that key's list."""
        first = line_of(self.content, (name, key) if key else (name,))
        lines = self.content.splitlines()[first - 1 :] if value else []
        return next((first + i for i, line in enumerate(lines) if value in re.split("[\"']", line)), first)

    def of(self, path: str) -> tuple[str, ...]:
        """The features that have a file of ours; in a good table one."""
        return tuple(
            name
            for name, feature in self.entries.items()
            if any(fits(path, pattern) for pattern in feature.files)
        )

    def files(self, name: str, own: Iterable[str]) -> tuple[str, ...]:
        """Those of our own files that a feature has."""
        return tuple(path for path in own if name in self.of(path))

    @property
    def holds(self) -> Iterator[tuple[str, str, str]]:
        """What holds of the whole tree: the feature, the test, and what to read where it fails."""
        for name, feature in self.entries.items():
            for test, words in feature.holds.items():
                yield name, test, words


def fits(path: str, pattern: str) -> bool:
    """Whether an entry of ``files`` names a path.

    >>> fits("csrc/flash_attn/api/calls.h", "csrc/*"), fits("csrc/a.h", "csrc/a.cpp")
    (True, False)
    """
    return fnmatchcase(path, pattern)


def table_of(own: Path) -> Path:
    """Where the features of our own files are told.

    >>> table_of(Path("fork/flash-attn")).name
    'flash-attn.toml'
    """
    return own.with_name(own.name + ".toml")


def read(own: Path | None) -> Features | None:
    """The features of our own files; None: there is no table.

    Raises:
        SeriesError: file, line and key of every mistake.
    """
    if own is None or not (path := table_of(own)).is_file():
        return None
    text = listing.text_of(path)
    try:
        return Features(path, text, _ENTRIES.validate_python(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as e:
        at = re.search(r"at line (\d+)", str(e))
        raise SeriesError(f"{path}:{at[1] if at else 1}: not TOML: {e}.") from e
    except ValidationError as e:
        keys = [field.alias or name for name, field in Feature.model_fields.items()]
        mistakes = [mistake_at(path, text, d["loc"], explain(d, keys), SeriesError) for d in e.errors()]
        raise SeriesError("\n".join(str(mistake) for mistake in mistakes)) from None

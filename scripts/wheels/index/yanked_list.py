"""The list of yanked wheels: ``yanked.toml``, a reason by file name.

Installers pass over a yanked wheel, unless its version is asked for by ``==``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationError

from scripts.base.documents import Document
from scripts.base.errors import UsageError
from scripts.source.mistakes import explain, mistake_at

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pathlib import Path

FILE = "yanked.toml"


class Yanked(Document):
    """What the file holds."""

    format: Literal[1]
    wheels: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)

    def reason(self, name: str) -> str | None:
        """Why a wheel is yanked, by its file name; None: it is not."""
        return self.wheels.get(name)


def read(path: Path | None) -> Yanked:
    """The list in a file; without one, nothing is yanked.

    Raises:
        UsageError: it cannot be read.
        MatrixError: it is wrong; file, line and key are named.
    """
    if path is None:
        return Yanked(format=1)
    try:
        text = path.read_text(encoding="utf-8")
        return Yanked.model_validate(tomllib.loads(text))
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}.") from e
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UsageError(f"{path}: not TOML: {e}.") from None
    except ValidationError as e:
        first = e.errors()[0]
        message = explain(first, Yanked.model_fields)
        if first["loc"] == ("format",):
            message += '; begin the file with "format = 1"'
        raise mistake_at(path, text, first["loc"], message) from None

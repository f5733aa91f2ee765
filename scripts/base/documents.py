"""JSON documents on disk: models with a version; what is damaged or of another type is refused in one way."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.base.errors import BuildError


class Document(BaseModel):
    """What a file of this project's own holds. A field ``format: Literal[N]`` is its version."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OpenDocument(Document):
    """One that others write too: it may hold more than is read here."""

    model_config = ConfigDict(extra="allow")


AnyDocument = TypeVar("AnyDocument", bound=Document)


def parse(
    model: type[AnyDocument], text: str | bytes, where: Path | str, *, error: type[BuildError], remedy: str
) -> AnyDocument:
    """A document's content, checked.

    Args:
        model: what it must be.
        text: what the file holds.
        where: the file, for the message.
        error: raised for damage, a wrong type, a missing or unknown key, or another version.
        remedy: what to do about it, as the end of a sentence.
    """
    try:
        return model.model_validate_json(text)
    except ValidationError as e:
        mistakes = sorted(
            e.errors(), key=lambda m: m["loc"] != ("format",)
        )  # another version explains the rest
        first = mistakes[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["loc"] == ("format",) and first["type"] == "literal_error":
            flaw = f"format {first['input']!r} is of another version of this program"
        else:
            flaw = f"{key}: {first['msg']}" if key else first["msg"]
        raise error(f"{where} is damaged: {flaw}; {remedy}.") from None


def read(model: type[AnyDocument], path: Path, *, error: type[BuildError], remedy: str) -> AnyDocument:
    """The document in a file; an unreadable file is refused like a damaged one."""
    try:
        content = path.read_bytes()
    except OSError as e:
        raise error(f"{path}: {e.strerror}; {remedy}.") from e
    return parse(model, content, path, error=error, remedy=remedy)

"""Documents on disk: what is damaged in several ways is told by what explains the rest."""

from __future__ import annotations

import re
from typing import Literal

import pytest

from scripts.base import documents
from scripts.base.errors import SeriesError


class Note(documents.Document):
    """A document of two fields."""

    number: int
    format: Literal[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"number": "x", "format": 1}',
            "note is damaged: format 1 is of another version of this program; go.",
        ),
        ('{"number": "1", "format": 2}', "note is damaged: number: Input should be a valid integer; go."),
        ('{"format": 2}', "note is damaged: number: Field required; go."),
        ('{"number": 1, "format": 2, "more": 3}', "note is damaged: more: "),
        ("{", "note is damaged: Invalid JSON"),
    ],
)
def test_another_version_is_told_before_what_follows_from_it(text: str, said: str) -> None:
    with pytest.raises(SeriesError, match=f"^{re.escape(said)}"):
        documents.parse(Note, text, "note", error=SeriesError, remedy="go")


def test_a_document_reads_back() -> None:
    read = documents.parse(Note, '{"number": 1, "format": 2}', "note", error=SeriesError, remedy="go")
    assert read == Note(number=1, format=2)

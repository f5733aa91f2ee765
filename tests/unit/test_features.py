"""Features of our own files: their table, and what they hold of the whole tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import GuardError, SeriesError
from scripts.series import features, guards, whole
from scripts.series.tree import Tree
from tests.unit.conftest import write_files, write_guard_test

TEST = "tests/guards/test_it.py::test_setup"
TABLE = f"""# Features.
[lines]
title = "A line"
files = ["flash_attn/fork.py", "csrc/*"]

[lines.holds]
"{TEST}" = '''
Read what follows
from it.'''
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of our own files, with a table beside it."""
    write_files(tmp_path / "fork", {"one/flash_attn/fork.py": "a = 1\n", "one.toml": TABLE})
    return tmp_path / "fork/one"


def read(own: Path) -> features.Features:
    told = features.read(own)
    assert told is not None
    return told


def test_a_table_says_whose_a_file_is_and_in_which_line(own: Path) -> None:
    told = read(own)
    assert told.of("csrc/flash_attn/src/fork.h") == told.of("flash_attn/fork.py") == ("lines",)
    assert told.of("setup.py") == ()
    assert told.files("lines", ["a.py", "csrc/b.h"]) == ("csrc/b.h",)
    assert [told.line("lines"), told.line("lines", "files", "csrc/*"), told.line("lines", "holds", TEST)] == [
        2,
        4,
        7,
    ]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ('title = "A line"\n', "", r"one\.toml:2: lines\.title: this key is missing"),
        ("files = [", "file = [", r"one\.toml:4: lines\.file: unknown key; allowed are title, text, files"),
        ('"csrc/*"', "3", r"one\.toml:4: lines\.files\.1: .*it is the number 3"),
        ("[lines]", "[lines", r"one\.toml:2: not TOML: "),
    ],
)
def test_a_mistake_is_told_by_line_and_key(own: Path, before: str, after: str, expected: str) -> None:
    table = features.table_of(own)
    table.write_text(table.read_text().replace(before, after, 1))
    with pytest.raises(SeriesError, match=expected):
        features.read(own)


def test_where_there_is_no_table_nothing_is_told(own: Path) -> None:
    features.table_of(own).unlink()
    assert features.read(own) is None
    assert features.read(None) is None


def test_what_a_feature_holds_is_asked_of_the_whole_tree(
    own: Path, applied: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes before any patch, so no guard can be it."""
    monkeypatch.setattr(layout, "ROOT", own.parents[1])
    write_guard_test(
        own.parents[1], "def test_setup(tree):\n    assert 'line 3' in (tree / 'setup.py').read_text()\n"
    )
    (held,) = whole.run(read(own), applied)
    assert (held.feature, held.passed, held.read) == ("lines", True, "Read what follows from it.")
    assert whole.faults([held]) == []


def test_what_no_longer_holds_is_told_with_what_to_read(
    own: Path, applied: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "ROOT", own.parents[1])
    write_guard_test(own.parents[1], "def test_setup(tree):\n    assert not (tree / 'setup.py').is_file()\n")
    found = whole.run(read(own), applied)
    with pytest.raises(
        GuardError,
        match=rf"one\.toml:7: test {TEST} fails on the whole series, and feature lines needs it\. "
        r"Read what follows from it\.\n(.*\n)*.*is_file",
    ):
        guards.require([], also=whole.faults(found))


def test_a_check_that_is_not_there_is_told_by_its_line(own: Path, applied: Tree) -> None:
    with pytest.raises(
        GuardError, match=r"one\.toml:7: holds 'tests/guards/test_it.*there is no tests/guards"
    ):
        whole.run(read(own), applied)

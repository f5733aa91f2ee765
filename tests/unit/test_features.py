"""Features of our own files: their table, and what they hold of the whole tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import GuardError, SeriesError
from scripts.series import features, guards, lint_features, model, whole
from scripts.series.own import OwnFiles
from scripts.series.tree import Tree
from tests.unit.conftest import BASE, TWO, Command, Make, stand_on, write_files, write_guard_test

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


FILES = {"flash_attn/fork.py": b"", "csrc/flash_attn/src/fork.h": b""}


def told_of(own: Path, series: model.Series, files: dict[str, bytes] = FILES) -> list[str]:
    """What lint says of a table, with paths from the folder above."""
    problems = lint_features.check(OwnFiles(own, files), series)
    return [str(p).replace(f"{own.parents[1]}/", "") for p in problems]


def build_table(own: Path, more: str = "") -> None:
    features.table_of(own).write_text(f"[build]\ntitle = 'All'\nfiles = ['*/fork.h']\n{more}")


def test_each_of_our_own_files_belongs_to_one_feature(own: Path, series: model.Series) -> None:
    build_table(own)
    assert told_of(own, series) == [
        "fork/one/flash_attn/fork.py:1: belongs to no feature; name it in one of fork/one.toml."
    ]
    build_table(own, "[other]\ntitle = 'Other'\nfiles = ['*']\n")
    assert told_of(own, series) == [
        "fork/one/csrc/flash_attn/src/fork.h:1: belongs to build and other in fork/one.toml; leave it to one."
    ]
    build_table(own, "[other]\ntitle = 'Other'\nfiles = ['flash_attn/fork.py']\n")
    assert told_of(own, series) == []


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("files = [\n 'flash_attn/*',\n \"gone.h\",\n]", ":8: other: no file of ours is gone.h; drop it."),
        (
            "files = ['flash_attn/*']\ntests = [\"tests/gone.py\"]",
            ":7: other: there is no tests/gone.py; name a",
        ),
        (
            f"files = ['flash_attn/*']\n[other.holds]\n\"{TEST}\" = ''",
            ":8: other: holds 'tests/guards/test_it",
        ),
        (
            "files = ['flash_attn/*']\n[other.holds]\n'symbol x in y' = ''",
            ":8: other: holds 'symbol x in y': it is no t",
        ),
        (
            "files = ['flash_attn/*']\n[last]\ntitle = 'Last'",
            ":7: last has no file, and no patch names it; drop it.",
        ),
        ("file = ['*']", ":6: other.file: unknown key"),
    ],
)
def test_what_a_table_names_is_there(own: Path, series: model.Series, more: str, expected: str) -> None:
    build_table(own, f"[other]\ntitle = 'Other'\n{more}\n")
    (told,) = told_of(own, series)
    assert told.startswith(f"fork/one.toml{expected}")


def test_a_patch_names_a_feature_of_the_table(own: Path, series: model.Series) -> None:
    features.table_of(own).write_text("[lines]\ntitle = 'All'\nfiles = ['*']\n")
    told = told_of(own, series)
    assert [text.partition(": ")[2] for text in told] == [
        "Feature 'build' is none of fork/one.toml: lines."
    ] * 2
    at = series.patches[0].content.decode().split("\n").index("Feature: build") + 1
    assert told[0].startswith(f"patches/Change-line-20.patch:{at}: ")


def test_own_files_need_a_table_and_patches_alone_need_none(own: Path, series: model.Series) -> None:
    features.table_of(own).unlink()
    assert [text.partition(": ")[0] for text in told_of(own, series)] == ["fork/one.toml:1"]
    assert told_of(own, series, {}) == []


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


def test_guards_runs_what_features_hold_of_the_whole_tree(
    make_series: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    make_series((*TWO[0], "symbol twenty in setup.py"), folder=tmp_path, to="patches/flash-attn")
    write_files(tmp_path, {"fork/flash-attn.toml": TABLE})
    write_guard_test(tmp_path, "def test_setup(tree):\n    assert (tree / 'setup.py').is_file()\n")
    stand_on(tmp_path, BASE, {"flash_attn/fork.py": "a = 1\n"}, monkeypatch)
    done = command("guards", "--upstream", "flash-attn", "--json")
    assert done.status == 0, done.err
    guard, held = json.loads(done.out)
    assert (held["feature"], held["patch"], held["whole"], held["discriminates"]) == (
        "lines",
        None,
        True,
        True,
    )
    assert guard.keys() == held.keys() - {"feature"}
    assert "1 of the whole tree pass" in done.err
    write_guard_test(tmp_path, "def test_setup(tree):\n    assert not (tree / 'setup.py').is_file()\n")
    done = command("guards", "--upstream", "flash-attn")
    assert done.status == GuardError.exit_code
    assert "fork/flash-attn.toml:7: test" in done.err
    assert "Read what follows from it." in done.err
    assert command("guards", "line-20").status == 0, "of one patch, its own guards alone"


def test_a_check_that_is_not_there_is_told_by_its_line(own: Path, applied: Tree) -> None:
    with pytest.raises(
        GuardError, match=r"one\.toml:7: holds 'tests/guards/test_it.*there is no tests/guards"
    ):
        whole.run(read(own), applied)

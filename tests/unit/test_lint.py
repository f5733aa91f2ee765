from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.base.errors import SeriesError
from scripts.series import lint, model, places
from scripts.source import matrix
from tests.unit.conftest import BASE, ROOT, TWO, WHY, Make, write_files

FIRST = "Change-line-20.patch"


def swap(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / FIRST).read_text()
        assert old in text
        (folder / FIRST).write_text(text.replace(old, new, 1))

    return edit


def rename(name: str, sides: str = "ab") -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / FIRST).read_text()
        for side in sides:
            text = text.replace(f"{side}/setup.py", f"{side}/{name}")
        (folder / FIRST).write_text(text)

    return edit


@pytest.mark.parametrize("loaded", matrix.load(ROOT / "wheel_matrix.toml").each(), ids=lambda one: one.name)
def test_the_repository_s_series_is_well_formed(loaded: matrix.Matrix) -> None:
    place = places.of(loaded)
    assert lint.check(place.patches, loaded.upstream.package, place.own) == []


def test_a_good_series_has_no_problem(make_series: Make) -> None:
    assert lint.check(make_series(*TWO)) == []


@pytest.mark.parametrize(
    ("edit", "line", "expected"),
    [
        (swap("[PATCH] Change", "[PATCH] Changed"), "Subject", "not in the imperative"),
        (swap("[PATCH] Change", "[PATCH] change"), "Subject", "not in the imperative"),
        (swap("line 20\n", "line 20.\n"), "Subject", "full stop"),
        (swap("line 20\n", "line 20 " + "x" * 70 + "\n"), "Subject", "characters; say it in 72"),
        (
            swap("Because a test needs a patch of this kind and nothing else does.", "Because."),
            "Subject",
            "does not say why",
        ),
        (
            swap("Guard: symbol fork in csrc/flash_attn/src/fork.h\n", ""),
            "Upstream-Status",
            "no trailer Guard",
        ),
        (swap("Guard: symbol fork in", "Guard: hope for"), "Guard", "is none of 'symbol NAME in FILE'"),
        (
            swap("Upstream-Status: Pending", "Upstream-Status: Submitted"),
            "Upstream-Status",
            "'Submitted' is not Pending",
        ),
        (
            swap("Upstream-Status: Pending", "Upstream-Status: Inappropriate []"),
            "Upstream-Status",
            "is not Pending",
        ),
        (
            swap("Feature: build\n", "Feature: build\nFeature: build\n"),
            "Feature: build",
            "a second trailer Feature",
        ),
        (
            swap("Feature: build\n", "Feature: build\n\nAnd more prose.\n"),
            "And more",
            "text after the trailers",
        ),
        (swap("+line twenty", "+line twenty "), "+line twenty", "spaces at the end of a line of setup.py"),
        (swap("+line twenty", "+line twenty\r"), "+line twenty", "a carriage return"),
        (swap("+line twenty", "+ \tline"), "+ \t", "a space before a tab"),
        (swap("+line twenty", "+<<<<<<< HEAD"), "+<<<<", "a conflict marker in setup.py"),
        (
            swap("Guard: symbol fork in csrc/flash_attn", "Guard: symbol fork in /etc"),
            "Guard",
            "no path within upstream's tree",
        ),
        (swap("of this kind", "of patch 2's kind"), "Because", "'patch 2': numbers change"),
        (swap("of this kind", "(compare -- --patch 0001)"), "Because", "'--patch 0001': numbers change"),
        (rename("../setup.py", "b"), "diff --git", "../setup.py is none of upstream's files"),
        (rename("../setup.py"), "diff --git", "none of upstream's files"),
        (rename("csrc/cutlass/x.h"), "diff --git", "none of upstream's files"),
    ],
)
def test_a_fault_is_told_by_file_and_line(
    make_series: Make, edit: Callable[[Path], None], line: str, expected: str
) -> None:
    folder = make_series(*TWO)
    edit(folder)
    problems = [p for p in lint.check(folder) if expected in p.text]
    assert len(problems) == 1, lint.check(folder)
    assert problems[0].path == folder / FIRST
    lines = (folder / FIRST).read_bytes().decode().split("\n")
    assert lines[problems[0].line - 1].startswith(line), lines[problems[0].line - 1]


@pytest.mark.parametrize(("lines", "problems"), [(3, 0), (4, 1), (9, 1)])
def test_more_context_than_git_writes_is_too_much(
    make_series: Make, tmp_path: Path, lines: int, problems: int
) -> None:
    folder = make_series(TWO[0])
    text = (folder / FIRST).read_text()
    start = text.index("@@ ")
    hunk = [f"@@ -{20 - lines},{2 * lines + 1} +{20 - lines},{2 * lines + 1} @@"]
    hunk += [
        *(f" line {i}" for i in range(20 - lines, 20)),
        "-line 20",
        "+line twenty",
        *(f" line {i}" for i in range(21, 21 + lines)),
    ]
    (folder / FIRST).write_text(text[:start] + "\n".join(hunk) + "\n")
    assert len([p for p in lint.check(folder) if "more than 3 lines of context" in p.text]) == problems


def test_a_diff_that_git_does_not_read_is_damaged(make_series: Make) -> None:
    """The unidiff package takes this header for no hunk, and the file for unchanged."""
    folder = make_series(TWO[0])
    text = (folder / FIRST).read_text()
    (folder / FIRST).write_text(re.sub(r"(?m)^@@ -(\d+),\d+ ", r"@@ -\1,x ", text))
    (told,) = lint.check(folder)
    assert "the diff is damaged" in told.text
    assert "git checkout -- " in told.text


def test_much_code_in_an_upstream_file_and_much_of_upstream_in_a_patch_are_told(make_series: Make) -> None:
    long = {"setup.py": BASE["setup.py"] + "more\n" * 41}
    (told,) = lint.check(make_series(("Add much", long)))
    assert "adds 41 lines to upstream's setup.py; put code into a new file" in told.text


HOOK, FREE = "Inappropriate [hook, for us]", "Pending"


@pytest.mark.parametrize(
    ("added", "free"),
    [
        ("fork_mode::process();", False),
        ("#if FORK_KERNELS", False),
        ("from ._fork import fork_info", False),
        ('#include "core/host.h"', False),
        ('#include "ghost.h"', True),
        ("from flash_attn.determinism import mode", False),
        ("from flash_attn.determinism_of_theirs import mode", True),
        ("from .determinism import mode", False),
        ("pid = os.fork()", True),
        ("a fork of ours", True),
    ],
)
def test_what_names_our_code_is_a_hook(make_series: Make, tmp_path: Path, added: str, free: bool) -> None:
    folder = make_series(("Call it", {"setup.py": BASE["setup.py"] + added + "\n"}))
    own = {"csrc/flash_attn/core/host.h": "", "flash_attn/determinism.py": "", "flash_attn/__init__.py": ""}
    write_files(tmp_path / "fork", own)
    (tmp_path / "fork.toml").write_text("[build]\ntitle = 'All'\nfiles = ['*']\n")
    path = folder / "Call-it.patch"
    for status, allowed in ((FREE, free), ("Inappropriate [not theirs]", free), (HOOK, True)):
        text = path.read_text()
        path.write_text(re.sub("(?m)^Upstream-Status: .*", f"Upstream-Status: {status}", text))
        told = [
            p for p in lint.check(folder, own=tmp_path / "fork") if "write Inappropriate [hook]" in p.text
        ]
        assert len(told) == (not allowed), (status, told)
        assert all(text.split("\n")[p.line - 1].startswith("Upstream-Status") for p in told)


def test_a_long_patch_says_why(make_series: Make) -> None:
    """Its lines are those of the file."""
    base = BASE | {"flash_attn/big.py": "".join(f"x = {i}\n" for i in range(200))}
    folder = make_series(("Drop half", {"flash_attn/big.py": "x = 0\n"}), base=base)
    path = folder / "Drop-half.patch"
    text = path.read_text()
    (told,) = lint.check(folder)
    assert f"the file has {text.count(chr(10))} lines, above 150; split it, or say why" in told.text
    path.write_text(text.replace("Feature: build\n", "Feature: build\nLong: half is much\n"))
    assert lint.check(folder) == []
    assert model.read(folder).patches[0].body == WHY


def test_a_file_of_an_earlier_patch_is_not_upstream_s(make_series: Make) -> None:
    """Conflicts with the next release come from upstream's files alone."""
    own = {"flash_attn/own.py": "".join(f"x = {i}\n" for i in range(600))}
    longer = {"flash_attn/own.py": "y = 0\n" * 41 + "".join(f"x = {i}\n" for i in range(300))}
    problems = lint.check(make_series(("Add a file", own), ("Change most of it", longer)))
    assert ["above 150" in p.text for p in problems] == [True, True]


def test_quoting_much_is_told(make_series: Make) -> None:
    base = BASE | {"flash_attn/big.py": "".join(f"x = {i}\n" for i in range(600))}
    short = {"flash_attn/big.py": "".join(f"x = {i}\n" for i in range(300))}
    problems = lint.check(make_series(("Drop half", short), base=base))
    assert ["quotes 303 lines of upstream's" in p.text for p in problems] == [False, True]


def number(folder: Path) -> None:
    """Name the first patch as format-patch does."""
    (folder / FIRST).rename(folder / f"0001-{FIRST}")
    (folder / "series").write_text(f"0001-{FIRST}\nAdd-a-header.patch\n")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda p: (p / "Stray.patch").write_text(""), r"does not name Stray.patch"),
        (lambda p: (p / "folder").mkdir(), "is no patch; patches/ holds patches and series"),
        (lambda p: (p / "series").write_text("# nothing\n"), "names no patch"),
        (lambda p: (p / "series").write_text(f"{FIRST}\n../x.patch\n"), "is no patch's file name"),
        (lambda p: (p / "series").write_text(f"{FIRST} # twice\n{FIRST}\n"), "already named in line 1"),
        (
            number,
            "0001-Change-line-20.patch has a number; the order is that of this file, so name it Change-",
        ),
        (
            lambda p: (p / FIRST).write_bytes((p / FIRST).read_bytes().replace(b"\n", b"\r\n")),
            "lines end with carriage returns",
        ),
        (lambda p: (p / FIRST).write_bytes(b"From: caf\xe9\n"), "not UTF-8"),
        (lambda p: (p / "series").write_bytes(b"# caf\xe9\n"), "not UTF-8"),
    ],
)
def test_a_fault_of_the_series_file_is_told(
    make_series: Make, edit: Callable[[Path], object], expected: str
) -> None:
    folder = make_series(*TWO)
    edit(folder)
    problems = lint.check(folder)
    assert any(expected in p.text for p in problems), problems
    assert all(p.line >= 1 for p in problems)


def test_a_patch_is_named_by_number_file_or_a_part(make_series: Make) -> None:
    whole = model.read(make_series(*TWO))
    assert [whole.named(text) for text in ("1", "2", FIRST, "Add-a-header", "header")] == [
        0,
        1,
        0,
        1,
        1,
    ]
    for text in ("3", "absent", "line 20 header", ""):
        with pytest.raises(
            SeriesError, match=r"names no patch of the series, which has:\n.*Change-line-20\.patch"
        ):
            whole.named(text)
    with pytest.raises(SeriesError, match="several"):
        whole.named("a")

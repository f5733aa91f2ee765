from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.base.errors import SeriesError
from scripts.series import changes, model
from scripts.source import matrix
from tests.unit.conftest import BASE, ROOT, Make, write_files

MATRIX = matrix.load(ROOT / "wheel_matrix.toml")
EDIT = BASE["setup.py"].replace("line 20\n", "line twenty\n")
TWO = [
    ("Change line 20", {"setup.py": EDIT}),
    ("Add a header", {"csrc/flash_attn/src/fork.h": "#pragma once\n"}),
]


def test_the_digest_follows_base_order_names_and_bytes(make_series: Make) -> None:
    folder = make_series(*TWO)
    whole = model.read(folder)
    digests = {
        whole.digest("a"),
        whole.digest("b"),
        model.Series(folder, whole.patches[::-1]).digest("a"),
        model.Series(folder, whole.patches[:1]).digest("a"),
    }
    assert len(digests) == 4
    assert whole.digest("a") == model.read(folder).digest("a")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            lambda p: (p / "series").write_text("Change-line-20.patch\nabsent.patch\n"),
            r"series:2: .*absent\.patch does not exist",
        ),
        (
            lambda p: (p / "series").write_text("Change-line-20.patch\n" * 2),
            r"series:2: .* already named in line 1",
        ),
        (
            lambda p: (p / "series").write_text("# none\nChange-line-20.patch  # one\n"),
            r"does not name Add-a-header\.patch",
        ),
        (lambda p: (p / "series").unlink(), r"series: no such file\. Take it back \(git checkout -- "),
        (
            lambda p: _swap(p, "+line twenty\n", ""),
            r"Change-line-20\.patch:\d+: the diff is damaged: corrupt patch at line \d+",
        ),
        (
            lambda p: _swap(p, "Upstream-Status: Pending", "Upstream-Status: Maybe"),
            r"Change-line-20.*'Maybe' is not Pending",
        ),
        (
            lambda p: _swap(p, "Upstream-Status: Pending", "Upstream-Status: Backport"),
            "'Backport' is not Pending",
        ),
        (lambda p: _swap(p, "Upstream-Status: Pending\n", ""), "no trailer Upstream-Status"),
        (
            lambda p: _swap(p, "Feature: build", "Feature: some magic"),
            "'some magic' is no name",
        ),
        (lambda p: _swap(p, "Subject: ", "X-Subject: "), "no Subject"),
        (lambda p: _swap(p, "\ndiff --git", "\nDIFF --git"), "no diff"),
    ],
)
def test_a_malformed_series_is_named_by_file_and_fault(
    make_series: Make, edit: Callable[[Path], object], expected: str
) -> None:
    folder = make_series(*TWO)
    edit(folder)
    with pytest.raises(SeriesError, match=expected):
        model.read(folder)


def _swap(folder: Path, old: str, new: str) -> None:
    path = folder / "Change-line-20.patch"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_changes_tells_each_patch_in_order_and_is_checked(make_series: Make, tmp_path: Path) -> None:
    for name in MATRIX.upstreams:
        make_series(*TWO, folder=tmp_path, to=f"patches/{name}")
    text = changes.render(MATRIX, tmp_path)
    assert text.count("| build |  | 2 | – |\n") == len(MATRIX.upstreams)
    assert text.index("### build\n\n#### Change line 20\n\nBecause a test") < text.index("#### Add a header")
    at = [text.index(f"\n## {one.upstream.distribution} {one.upstream.version}\n") for one in MATRIX.each()]
    assert at == sorted(at)
    path = tmp_path / "CHANGES.md"
    with pytest.raises(SeriesError, match="stale"):
        changes.check(path, text)
    assert changes.write(path, text)
    assert not changes.write(path, text)
    changes.check(path, text)
    path.write_text(text + "by hand\n")
    with pytest.raises(SeriesError, match="stale"):
        changes.check(path, text)


def test_changes_tells_each_feature_with_its_files_and_patches(make_series: Make, tmp_path: Path) -> None:
    table = (
        "[lines]\ntitle = 'Lines'\ntext = 'What and why.'\ntests = ['tests/unit']\nfiles = ['flash_attn/f*.py']\n"
        "figures = 'Twice as fast.'\n[build]\ntitle = 'A build'\n"
    )
    for name in MATRIX.upstreams:
        make_series(TWO[0], folder=tmp_path, to=f"patches/{name}")
        write_files(tmp_path / f"fork/{name}", {"flash_attn/fork.py": "", "flash_attn/fun.py": ""})
        (tmp_path / f"fork/{name}.toml").write_text(table)
    text = changes.render(MATRIX, tmp_path)
    rows = (
        "|---|---|---|---|\n| lines | Lines | – | 2 |\n| build | A build | 1 | – |\n\n### lines\n\nLines.\n\n"
    )
    told = "What and why.\n\nTwice as fast.\n\nProved by `tests/unit`.\n\nFiles: `flash_attn/f*.py`.\n\n"
    assert text.count(f"{rows}{told}### build\n\nA build.\n\n#### Change line 20\n") == len(MATRIX.upstreams)
    assert "\n\nUpstream: Pending. In `setup.py`.\n" in text


def test_the_repository_s_changes_are_what_its_patches_say() -> None:
    changes.check(ROOT / "CHANGES.md", changes.render(MATRIX, ROOT))


def test_a_byte_order_mark_is_named(make_series: Callable[..., Path]) -> None:
    path = make_series(("Add a file", {"new.txt": "new\n"})) / "series"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    with pytest.raises(SeriesError, match="series:1: starts with a byte order mark"):
        model.read(path.parent)

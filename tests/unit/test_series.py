from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import changes, matrix, series
from scripts.errors import SeriesError
from scripts.git import Repository
from tests.unit.conftest import BASE, checkout_of, message, write_files

ROOT = Path(__file__).resolve().parents[2]
MATRIX = matrix.load(ROOT / "wheel_matrix.toml")
PIN = MATRIX.upstream
EDIT = BASE["setup.py"].replace("line 20\n", "line twenty\n")
TWO = [("Change line 20", {"setup.py": EDIT}), ("Add a header", {"csrc/flash_attn/src/fork.h": "#pragma once\n"})]
Make = Callable[..., Path]


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_applying_gives_one_commit_a_patch_and_always_the_same_id(make_series: Make, tmp_path: Path) -> None:
    patches = series.read(make_series(*TWO))
    trees = [series.apply(patches, PIN, checkout_of(BASE), tmp_path / name / "source") for name in ("one", "two")]
    assert trees[0].commit == trees[1].commit
    assert (trees[0].root / "setup.py").read_text() == EDIT
    log = Repository(trees[0].root, SeriesError).run("log", "--format=%s|%an|%ae|%cn|%ai|%ci").splitlines()
    assert [line.partition("|")[0] for line in log] == ["Add a header", "Change line 20", "flash-attn 2.8.3.post1"]
    assert len({line.partition("|")[2] for line in log}) == 1


def test_a_hostile_git_configuration_changes_no_byte(make_series: Make, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    patches = make_series(*TWO)
    plain = series.apply(series.read(patches), PIN, checkout_of(BASE), tmp_path / "plain/source")
    before = content(patches)
    request.getfixturevalue("hostile_git")
    hostile = series.apply(series.read(patches), PIN, checkout_of(BASE), tmp_path / "hostile/work/source")
    assert hostile.commit == plain.commit
    assert series.export(hostile.root, patches) == []
    assert content(patches) == before


def test_exporting_an_unchanged_tree_changes_no_byte_and_check_agrees(make_series: Make, tmp_path: Path) -> None:
    patches = make_series(*TWO)
    before = content(patches)
    tree = series.apply(series.read(patches), PIN, checkout_of(BASE), tmp_path / "source")
    assert series.export(tree.root, patches) == []
    assert series.export(tree.root, patches, check=True) == []
    assert content(patches) == before


def test_an_edited_commit_changes_its_patch_alone_and_check_tells(make_series: Make, tmp_path: Path) -> None:
    patches = make_series(*TWO)
    tree = series.apply(series.read(patches), PIN, checkout_of(BASE), tmp_path / "source")
    write_files(tree.root, {"csrc/flash_attn/src/fork.h": "#pragma once\n// more\n"})
    repository = Repository(tree.root, SeriesError)
    repository.run("add", "--all")
    repository.run("commit", "--quiet", "--amend", "--no-edit")
    with pytest.raises(SeriesError, match=r"0002-Add-a-header\.patch would change"):
        series.export(tree.root, patches, check=True)
    assert series.export(tree.root, patches) == ["0002-Add-a-header.patch"]


def test_a_hunk_that_would_move_is_refused(make_series: Make, tmp_path: Path) -> None:
    """Git am would place it two lines down without a word."""
    patches = series.read(make_series(TWO[0]))
    moved = BASE | {"setup.py": "new\nnew\n" + BASE["setup.py"]}
    with pytest.raises(SeriesError, match=r"0001-Change-line-20\.patch does not apply exactly:\n.*offset 2 lines"):
        series.apply(patches, PIN, checkout_of(moved), tmp_path / "source")
    assert not (tmp_path / "source").exists()


def test_a_hunk_that_does_not_fit_is_refused_and_the_finished_tree_stays(make_series: Make, tmp_path: Path) -> None:
    patches = series.read(make_series(TWO[0]))
    tree = series.apply(patches, PIN, checkout_of(BASE), tmp_path / "source")
    other = BASE | {"setup.py": BASE["setup.py"].replace("line 20\n", "line XX\n")}
    with pytest.raises(SeriesError, match="does not apply exactly"):
        series.apply(patches, PIN.model_copy(update={"version": "2.8.4"}), checkout_of(other), tmp_path / "source")
    assert (tree.root / "setup.py").read_text() == EDIT
    assert sorted(p.name for p in tmp_path.iterdir()) == ["author", "patches", "source"]


def test_applying_inside_another_repository_leaves_that_one_alone(make_series: Make, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    write_files(outer, {"README": "mine\n"})
    subprocess.run(["git", "init", "--quiet", str(outer)], check=True)
    tree = series.apply(series.read(make_series(*TWO)), PIN, checkout_of(BASE), outer / "build/source")
    assert (tree.root / "setup.py").read_text() == EDIT
    untouched = subprocess.run(["git", "-C", str(outer), "log"], capture_output=True, text=True, check=False)
    assert "does not have any commits" in untouched.stderr


def test_a_folder_that_is_no_repository_is_never_written_through(tmp_path: Path) -> None:
    """Git walks up to the enclosing repository; a command that writes must not."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    inner = tmp_path / "inner"
    inner.mkdir()
    with pytest.raises(SeriesError, match="is not the top level of a git repository"):
        Repository(inner, SeriesError).run("add", "--all")


def test_a_finished_tree_is_taken_again_and_a_changed_one_refused(make_series: Make, tmp_path: Path) -> None:
    patches = series.read(make_series(*TWO))
    tree = series.apply(patches, PIN, checkout_of(BASE), tmp_path / "source")
    before = (tree.root / "setup.py").stat().st_mtime_ns
    assert series.apply(patches, PIN, checkout_of(BASE), tmp_path / "source") == tree
    assert (tree.root / "setup.py").stat().st_mtime_ns == before
    (tree.root / "setup.py").write_text("mine\n")
    with pytest.raises(SeriesError, match=r"has changes that are in no patch:\n.*setup\.py"):
        series.apply(patches, PIN, checkout_of(BASE), tmp_path / "source")


def test_work_committed_on_the_tree_is_not_overwritten(make_series: Make, tmp_path: Path) -> None:
    patches = series.read(make_series(*TWO))
    tree = series.apply(patches, PIN, checkout_of(BASE), tmp_path / "source")
    write_files(tree.root, {"mine.h": "work\n"})
    repository = Repository(tree.root, SeriesError)
    repository.run("add", "--all")
    repository.run("commit", "--quiet", "-m", message("Add my work"))
    with pytest.raises(SeriesError, match="commits that are in no patch"):
        series.apply(patches, PIN, checkout_of(BASE), tmp_path / "source")
    assert (tree.root / "mine.h").exists()


def test_the_digest_follows_base_order_names_and_bytes(make_series: Make) -> None:
    folder = make_series(*TWO)
    whole = series.read(folder)
    digests = {
        whole.digest("a"),
        whole.digest("b"),
        series.Series(folder, whole.patches[::-1]).digest("a"),
        series.Series(folder, whole.patches[:1]).digest("a"),
    }
    assert len(digests) == 4
    assert whole.digest("a") == series.read(folder).digest("a")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda p: (p / "series").write_text("0001-Change-line-20.patch\nabsent.patch\n"), r"series:2: .*absent\.patch does not exist"),
        (lambda p: (p / "series").write_text("0001-Change-line-20.patch\n" * 2), r"series:2: .* already named in line 1"),
        (lambda p: (p / "series").write_text("# none\n0001-Change-line-20.patch  # one\n"), r"does not name 0002-Add-a-header\.patch"),
        (lambda p: (p / "series").unlink(), "No such file"),
        (lambda p: _swap(p, "Upstream-Status: Pending", "Upstream-Status: Maybe"), r"0001.*'Maybe' is not Pending"),
        (lambda p: _swap(p, "Upstream-Status: Pending", "Upstream-Status: Backport"), "'Backport' is not Pending"),
        (lambda p: _swap(p, "Upstream-Status: Pending\n", ""), "no trailer Upstream-Status"),
        (lambda p: _swap(p, "Feature: build", "Feature: magic"), "'magic' is none of build, determinism"),
        (lambda p: _swap(p, "Subject: ", "X-Subject: "), "no Subject"),
        (lambda p: _swap(p, "\ndiff --git", "\nDIFF --git"), "no diff"),
    ],
)
def test_a_malformed_series_is_named_by_file_and_fault(make_series: Make, edit: Callable[[Path], object], expected: str) -> None:
    folder = make_series(*TWO)
    edit(folder)
    with pytest.raises(SeriesError, match=expected):
        series.read(folder)


def _swap(folder: Path, old: str, new: str) -> None:
    path = folder / "0001-Change-line-20.patch"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("state", ["dirty", "rebase", "empty"])
def test_export_refuses_a_tree_that_is_not_finished(make_series: Make, tmp_path: Path, state: str) -> None:
    patches = make_series(*TWO)
    before = content(patches)
    tree = series.apply(series.read(patches), PIN, checkout_of(BASE), tmp_path / "source")
    repository = Repository(tree.root, SeriesError)
    if state == "dirty":
        (tree.root / "setup.py").write_text("mine\n")
    elif state == "rebase":
        (tree.root / ".git/rebase-merge").mkdir()
    else:
        repository.run("reset", "--quiet", "--hard", tree.base)
    with pytest.raises(SeriesError, match={"dirty": "uncommitted", "rebase": "in the middle", "empty": "no commits"}[state]):
        series.export(tree.root, patches)
    assert content(patches) == before


def test_changes_tells_each_patch_in_order_and_is_checked(make_series: Make, tmp_path: Path) -> None:
    patches = series.read(make_series(*TWO))
    text = changes.render(MATRIX, patches)
    assert text.index("## 0001 Change line 20\n\nBecause a test needs it.") < text.index("## 0002 Add a header")
    path = tmp_path / "CHANGES.md"
    with pytest.raises(SeriesError, match="stale"):
        changes.check(path, text)
    assert changes.write(path, text)
    assert not changes.write(path, text)
    changes.check(path, text)
    path.write_text(text + "by hand\n")
    with pytest.raises(SeriesError, match="stale"):
        changes.check(path, text)


def test_the_repository_s_changes_are_what_its_patches_say() -> None:
    changes.check(ROOT / "CHANGES.md", changes.render(MATRIX, series.read(ROOT / "patches")))

"""The series as a branch, and a patch alone: what is in it, its ids, and whose work is not overwritten."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.base.errors import SeriesError
from scripts.base.git import IDENTITY, Repository
from scripts.series import branches, export, model, own, tree
from scripts.series.branches import Asked, Branch
from scripts.source.matrix_tables import Upstream
from tests.unit.conftest import BASE, EDITED_SETUP, PIN, Make, checkout_of, commit, message, user, write_files

HEADER = "csrc/flash_attn/src/fork.h"
OWN = {HEADER: "#pragma once\n", "flash_attn/fork.py": "a = 1\n"}
INIT = "flash_attn/__init__.py"
THIRTY = EDITED_SETUP.replace("line 30\n", "line thirty\n")
EDITS = [
    ("Change line 20", {"setup.py": EDITED_SETUP}),
    ("Change line 30", {"setup.py": THIRTY}),
    ("Change line 20 again", {"setup.py": THIRTY.replace("line twenty\n", "line xx\n")}),
    ("Import a file of ours", {INIT: BASE[INIT] + "from flash_attn.fork import a\n"}),
    ("Be a hook", {INIT: BASE[INIT] + "from flash_attn.fork import a\nb = 2\n"}),
]


@pytest.fixture
def place(make_series: Make, tmp_path: Path) -> Path:
    """A clone with patches, files of its own, their tree, and a submodule with a history and more files."""
    make_series(*EDITS)
    hook = tmp_path / "patches/Be-a-hook.patch"
    hook.write_text(
        hook.read_text().replace("Upstream-Status: Pending", "Upstream-Status: Inappropriate [hook]")
    )
    write_files(tmp_path / "fork", OWN)
    submodule = tmp_path / "upstream"
    submodule.mkdir()
    user(submodule, "init", "--quiet")
    write_files(submodule, {"README.md": "old\n"})
    commit(submodule, "-m", "first")
    write_files(submodule, {**BASE, "README.md": "new\n"})
    commit(submodule, "-m", "the release")
    applied(tmp_path)
    return tmp_path


def series(place: Path) -> model.Series:
    return model.read(place / "patches", place / "fork")


def applied(place: Path, root: str = "source") -> tree.Tree:
    return tree.apply(series(place), PIN, checkout_of(BASE), place / root)


def pin_of(place: Path) -> Upstream:
    return PIN.model_copy(update={"commit": user(place / "upstream", "rev-parse", "HEAD").strip()})


def made(
    place: Path, name: str = "fork", patch: str | None = None, *, real: bool = True, force: bool = False
) -> Branch:
    """By a tree that lies elsewhere, as of a work tree with somebody's commits."""
    repository = Repository(place / "source", SeriesError)
    submodule = place / "upstream" if real else None
    asked = Asked(name, patch, force)
    return branches.make(repository, series(place), applied(place, "view"), asked, submodule, pin_of(place))


def test_a_branch_of_the_sdist_is_what_apply_makes(place: Path) -> None:
    branch = made(place, real=False)
    assert (branch.commit, branch.commits) == (applied(place).commit, len(EDITS) + 1)
    assert user(place / "source", "rev-parse", "fork").strip() == branch.commit
    assert not made(place, real=False).changed


def test_a_branch_stands_on_upstream_s_own_commit_and_history(place: Path, tmp_path: Path) -> None:
    branch = made(place)
    root, pin = place / "source", pin_of(place)
    assert branch.upstream == pin.commit
    subjects = user(root, "log", "--reverse", "--format=%s", "fork").splitlines()
    assert subjects == ["first", "the release", own.COMMIT, *(subject for subject, _ in EDITS)]
    assert user(root, "show", "fork:README.md") == "new\n"
    differing = user(root, "diff", "--name-only", "fork", applied(place).commit).split()
    assert differing == ["README.md"]
    told = user(root, "log", "-1", "--format=%an <%ae>", f"fork~{len(EDITS)}").strip()
    assert told == IDENTITY, "upstream's author wrote none of our files"
    shutil.rmtree(root)
    applied(place)
    assert made(place).commit == branch.commit, "its ids follow from what is in it"
    user(tmp_path, "init", "--quiet", "--bare", "public.git")
    user(root, "push", "--quiet", str(tmp_path / "public.git"), "fork")
    assert user(tmp_path / "public.git", "rev-parse", "fork").strip() == branch.commit


def test_the_tree_is_not_touched_and_a_branch_is_nobody_s_work(place: Path) -> None:
    before = applied(place)
    head = user(place / "source", "symbolic-ref", "HEAD")
    made(place)
    made(place, "one", "Change-line-30")
    assert user(place / "source", "symbolic-ref", "HEAD") == head
    assert user(place / "source", "status", "--porcelain") == ""
    assert tree.reusable(series(place), PIN, place / "source") == before
    write_files(place / "fork", {HEADER: "#pragma once // changed\n"})
    changed = applied(place)  # with a branch there whose commits are in no patch any more
    assert changed.commit != before.commit
    write_files(place / "fork", {HEADER: "#pragma once // once more\n"})
    (place / "patches/series").write_text((place / "patches/series").read_text() + "# a comment\n")
    hook = place / "patches/Be-a-hook.patch"
    hook.write_text(hook.read_text().replace("nothing else", "nothing more"))
    assert applied(place).commit != changed.commit  # a new repository, which has the branches too
    assert {"fork", "one"} <= {*user(place / "source", "branch", "--format=%(refname:short)").split()}


def test_commits_that_stand_on_a_branch_are_somebody_s_work(place: Path) -> None:
    made(place)
    root = place / "source"
    user(root, "checkout", "--quiet", "fork")
    write_files(root, {"flash_attn/mine.py": "c = 3\n"})
    commit(root, "-m", "Mine")
    user(root, "checkout", "--quiet", "series")
    write_files(place / "fork", {HEADER: "#pragma once // changed\n"})
    with pytest.raises(SeriesError, match=r"commits that are in no patch:\n.* Mine\."):
        applied(place)
    write_files(place / "fork", OWN)
    with pytest.raises(
        SeriesError, match=r"has commits that the new one lacks:\n.* Mine\n--force replaces it"
    ):
        made(place)
    assert user(root, "log", "-1", "--format=%s", "fork").strip() == "Mine"
    assert made(place, force=True).changed
    assert user(root, "log", "-1", "--format=%s", "fork").strip() == EDITS[-1][0]


def test_a_submodule_without_history_serves_too(place: Path) -> None:
    """As ``git submodule update --depth 1`` leaves it; then the tree's repository is shallow too."""
    (place / "upstream").rename(place / "whole")
    url = f"file://{place / 'whole'}"
    user(place, "clone", "--quiet", "--depth=1", url, str(place / "upstream"))
    branch, root = made(place), place / "source"
    assert made(place, "one", "Change-line-30").commits == 1
    user(root, "checkout", "--quiet", "fork")
    write_files(root, {"flash_attn/mine.py": "c = 3\n"})
    commit(root, "-m", "Mine")
    user(root, "checkout", "--quiet", "series")
    write_files(root, {HEADER: "#pragma once // changed\n", "setup.py": EDITED_SETUP})
    commit(root, "--amend", "--message", message("Be another hook"))
    assert export.export(root, place / "patches", place / "fork").own_written == (HEADER,)
    tree.apply(series(place), PIN, checkout_of(BASE), root, reset=True)
    assert user(root, "log", "-2", "--format=%s", "fork").splitlines() == ["Mine", EDITS[-1][0]]
    assert user(root, "rev-parse", "fork~1").strip() == branch.commit


def test_a_branch_goes_forward_unasked(place: Path) -> None:
    root = place / "source"
    made(place)
    user(root, "branch", "--force", "fork", "fork~1")
    assert made(place).changed


def test_a_branch_that_was_deleted_is_in_no_other_s_way(place: Path) -> None:
    made(place, "a/b")
    user(place / "source", "branch", "-D", "a/b")
    assert made(place, "a").changed
    write_files(place / "fork", {HEADER: "#pragma once // changed\n"})
    assert applied(place)  # nothing of it is somebody's work


def test_no_patch_is_named_by_nothing(place: Path) -> None:
    with pytest.raises(SeriesError, match="no patch"):
        made(place, "one", "")


def test_a_checked_out_branch_is_named(place: Path) -> None:
    made(place)
    user(place / "source", "checkout", "--quiet", "fork")
    with pytest.raises(SeriesError, match=r"has fork checked out.*git -C \S+ checkout series"):
        applied(place)


@pytest.mark.parametrize("real", [False, True])
def test_a_patch_alone_stands_on_bare_upstream(place: Path, real: bool) -> None:
    branch = made(place, "one", "Change-line-30", real=real)
    root = place / "source"
    assert (branch.commits, user(root, "rev-parse", "one^").strip()) == (1, branch.upstream)
    assert user(root, "diff", "--name-only", "one^", "one").split() == ["setup.py"]
    assert user(root, "show", "one:setup.py") == BASE["setup.py"].replace("line 30\n", "line thirty\n")
    assert user(root, "log", "-1", "--format=%an <%ae>%n%cn <%ce>%n%cd", "one") == user(
        root, "log", "-1", "--format=%an <%ae>%n%cn <%ce>%n%cd", "series~3"
    )
    shutil.rmtree(root)
    applied(place)
    assert made(place, "one", "Change-line-30", real=real).commit == branch.commit


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ("Be-a-hook", r"Be-a-hook.patch is not for upstream: its Upstream-Status is Inappropriate \[hook\]"),
        ("Import", "Import-a-file-of-ours.patch needs the fork's own files"),
        ("again", r"does not apply to upstream alone: it conflicts in setup\.py\. It needs earlier patches"),
    ],
)
def test_a_patch_that_upstream_cannot_take_alone_is_refused(place: Path, patch: str, expected: str) -> None:
    with pytest.raises(SeriesError, match=expected):
        made(place, "one", patch)
    assert "one" not in user(place / "source", "branch").split()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("series", "the branch series is checked out in"),
        ("a..b", "'a..b' is no name"),
        ("-x", "'-x' is no name"),
        ("base", "base is a tag of the tree"),
        ("series/x", "series/x cannot be made: .*'refs/heads/series' exists"),
    ],
)
def test_a_name_that_no_branch_can_have_is_refused(place: Path, name: str, expected: str) -> None:
    head = user(place / "source", "rev-parse", "series")
    with pytest.raises(SeriesError, match=expected):
        made(place, name, force=True)
    assert user(place / "source", "rev-parse", "series") == head


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({HEADER: "theirs\n"}, r"fork\.h: upstream has a file .* too"),
        ({"setup.py": "other\n"}, r"has other content than the files that the series stands on: setup\.py\."),
    ],
)
def test_an_upstream_that_is_not_the_release_s_is_refused(
    place: Path, files: dict[str, str], expected: str
) -> None:
    write_files(place / "upstream", files)
    commit(place / "upstream", "-m", "another")
    with pytest.raises(SeriesError, match=expected):
        made(place)

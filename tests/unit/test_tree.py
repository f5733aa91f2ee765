from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.base import layout
from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import export, formatting, model, tree
from scripts.source import matrix
from tests.unit.conftest import (
    BASE,
    EDITED_SETUP,
    HEADER,
    PIN,
    TWO,
    Make,
    apply,
    checkout_of,
    commit,
    message,
    user,
    write_files,
)
from tests.unit.waiting import a_tick

MATRIX = matrix.load(layout.MATRIX)
NOTHING = export.Exported((), ())


def change_a_message(patches: Path, name: str = "Change-line-20.patch") -> None:
    (patches / name).write_text((patches / name).read_text().replace("Because", "Since"))


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_applying_gives_one_commit_a_patch_and_always_the_same_id(
    series: model.Series, tmp_path: Path
) -> None:
    trees = [apply(series, tmp_path / name / "source") for name in ("one", "two")]
    assert trees[0].commit == trees[1].commit
    assert (trees[0].root / "setup.py").read_text() == EDITED_SETUP
    log = Repository(trees[0].root, SeriesError).run("log", "--format=%s|%an|%ae|%cn|%ai|%ci").splitlines()
    assert [line.partition("|")[0] for line in log] == [
        "Add a header",
        "Change line 20",
        "flash-attn 2.8.3.post1",
    ]
    assert len({line.partition("|")[2] for line in log}) == 1


def test_a_hostile_git_configuration_changes_no_byte(
    patches: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    plain = apply(model.read(patches), tmp_path / "plain/source")
    before = content(patches)
    request.getfixturevalue("hostile_git")
    hostile = apply(model.read(patches), tmp_path / "hostile/work/source")
    assert hostile.commit == plain.commit
    for key, value in {"format.signOff": "true", "core.bigFileThreshold": "1"}.items():
        user(hostile.root, "config", key, value)  # of the tree's own repository, which no variable shuts out
    assert export.export(hostile.root, patches) == NOTHING
    assert content(patches) == before


def test_exporting_an_unchanged_tree_changes_no_byte_and_check_agrees(
    patches: Path, applied: tree.Tree
) -> None:
    before = content(patches)
    assert export.export(applied.root, patches) == NOTHING
    assert export.export(applied.root, patches, check=True) == NOTHING
    assert content(patches) == before


def test_an_edited_commit_changes_its_patch_alone_and_check_tells(patches: Path, applied: tree.Tree) -> None:
    write_files(applied.root, {"csrc/flash_attn/src/fork.h": "#pragma once\n// more\n"})
    commit(applied.root, "--amend", "--no-edit")
    with pytest.raises(SeriesError, match=r"Add-a-header\.patch would change"):
        export.export(applied.root, patches, check=True)
    assert export.export(applied.root, patches) == export.Exported(("Add-a-header.patch",), ())


def test_a_hunk_that_would_move_is_refused(make_series: Make, tmp_path: Path) -> None:
    """Git am would place it two lines down without a word."""
    patches = model.read(make_series(TWO[0]))
    moved = BASE | {"setup.py": "new\nnew\n" + BASE["setup.py"]}
    with pytest.raises(SeriesError, match=r"Change-line-20\.patch does not apply exactly:\n.*offset 2 lines"):
        tree.apply(patches, PIN, checkout_of(moved), tmp_path / "source")
    assert not (tmp_path / "source").exists()


def test_a_hunk_that_does_not_fit_is_refused_and_the_finished_tree_stays(
    make_series: Make, tmp_path: Path
) -> None:
    patches = model.read(make_series(TWO[0]))
    applied = apply(patches, tmp_path / "source")
    other = BASE | {"setup.py": BASE["setup.py"].replace("line 20\n", "line XX\n")}
    with pytest.raises(SeriesError, match="does not apply exactly"):
        tree.apply(
            patches, PIN.model_copy(update={"version": "2.8.4"}), checkout_of(other), tmp_path / "source"
        )
    assert (applied.root / "setup.py").read_text() == EDITED_SETUP
    assert sorted(p.name for p in tmp_path.iterdir()) == ["patches", "source"]


def test_applying_inside_another_repository_leaves_that_one_alone(make_series: Make, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    write_files(outer, {"README": "mine\n"})
    subprocess.run(["git", "init", "--quiet", str(outer)], check=True)
    applied = tree.apply(model.read(make_series(*TWO)), PIN, checkout_of(BASE), outer / "build/source")
    assert (applied.root / "setup.py").read_text() == EDITED_SETUP
    untouched = subprocess.run(["git", "-C", str(outer), "log"], capture_output=True, text=True, check=False)
    assert "does not have any commits" in untouched.stderr


def nothing(inner: Path) -> None: ...


def empty(inner: Path) -> None:
    (inner / ".git").mkdir()


def of_another_folder(inner: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(inner)], check=True)
    worktree = ("config", "core.worktree", str(inner.parent))
    subprocess.run(["git", "-C", str(inner), *worktree], check=True)


@pytest.mark.parametrize("parent", ["plain", "with:colon"])  # which ends a folder in git's list of ceilings
@pytest.mark.parametrize("git", [nothing, empty, of_another_folder])
def test_a_folder_that_is_no_repository_is_never_written_through(
    parent: str, git: Callable[[Path], None], tmp_path: Path
) -> None:
    """Git walks up to the enclosing repository, or to the folder that is configured; a command that writes must not."""
    inner = tmp_path / parent / "inner"
    inner.mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(inner.parent)], check=True)
    git(inner)
    for write in (Repository(inner, SeriesError).run, Repository(inner, SeriesError).attempt):
        with pytest.raises(SeriesError, match="is not the top level of a git repository"):
            write("add", "--all")


def test_a_repository_that_is_gone_is_written_through_no_more(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    inner = tmp_path / "inner"
    inner.mkdir()
    repository = Repository.create(inner, SeriesError)
    repository.run("add", "--all")
    shutil.rmtree(inner / ".git")
    with pytest.raises(SeriesError, match="is not the top level of a git repository"):
        repository.run("add", "--all")


def test_a_finished_tree_is_taken_again_and_a_changed_one_refused(
    series: model.Series, applied: tree.Tree, tmp_path: Path
) -> None:
    before = (applied.root / "setup.py").stat().st_mtime_ns
    assert apply(series, tmp_path / "source") == applied
    assert (applied.root / "setup.py").stat().st_mtime_ns == before
    (applied.root / "setup.py").write_text("mine\n")
    with pytest.raises(SeriesError, match=r"has changes that are in no patch:\n.*setup\.py"):
        apply(series, tmp_path / "source")


def test_work_committed_on_the_tree_is_not_overwritten(
    series: model.Series, applied: tree.Tree, tmp_path: Path
) -> None:
    write_files(applied.root, {"mine.h": "work\n"})
    commit(applied.root, "-m", message("Add my work"))
    with pytest.raises(SeriesError, match="commits that are in no patch"):
        apply(series, tmp_path / "source")
    assert (applied.root / "mine.h").exists()


def loose(root: Path) -> None:
    (root / "setup.py").write_text("mine\n")


def rebase_in_progress(root: Path) -> None:
    user(root, "rebase", "-i", "HEAD~1", GIT_SEQUENCE_EDITOR="echo break >")


def picks_in_progress(root: Path) -> None:
    """Two commits were to be picked; the first met a conflict, and was committed by hand."""
    for number in range(2):
        write_files(root, {f"flash_attn/new_{number}.py": "1\n", "setup.py": f"{number}\n"})
        commit(root, "-m", message(f"Add file {number}"))
    user(root, "reset", "--quiet", "--hard", "HEAD~2")
    with pytest.raises(subprocess.CalledProcessError):
        user(root, "cherry-pick", "HEAD@{1}", "HEAD@{2}")
    commit(root, "-m", message("Add file 1"))


def older(root: Path) -> None:
    user(root, "checkout", "--quiet", "HEAD~1")


def committed_on_an_older_one(root: Path) -> None:
    older(root)
    write_files(root, {"flash_attn/mine.py": "1\n"})
    commit(root, "-m", message("Add mine"))


def bisect(root: Path) -> None:
    user(root, "bisect", "start", "HEAD", "base")


@pytest.mark.parametrize(
    ("act", "expected", "back"),
    [
        (loose, "uncommitted", ""),
        (rebase_in_progress, "in the middle of a rebase", "rebase --abort"),
        (lambda root: user(root, "reset", "--quiet", "--hard", "base"), "no commit that", ""),
        (
            older,
            r"HEAD is on no branch: it is \w+, and series has 1 more commit\. .* checkout series",
            "checkout series",
        ),
        (
            committed_on_an_older_one,
            "HEAD is on no branch: .* 1 commit that series lacks, and lacks 1 commit of series. .* checkout",
            "checkout series",
        ),
        (
            lambda root: user(root, "checkout", "--quiet", "--detach"),
            "HEAD is on no branch: .* checkout -B series",
            "checkout -B series",
        ),
        (bisect, "in the middle of a bisect; .* bisect reset", "bisect reset"),
        (picks_in_progress, "in the middle of a cherry-pick or revert", "cherry-pick --quit"),
        (
            lambda root: user(root, "checkout", "--quiet", "-b", "mine", "HEAD~1"),
            r"would remove Add-a-header\.patch, which series still has. .* checkout series",
            "checkout series",
        ),
    ],
)
def test_export_refuses_a_tree_that_is_not_finished(
    patches: Path, applied: tree.Tree, act: Callable[[Path], object], expected: str, back: str
) -> None:
    before = content(patches)
    act(applied.root)
    for check in (False, True):
        with pytest.raises(SeriesError, match=expected) as told:
            export.export(applied.root, patches, check=check)
        assert content(patches) == before
    if back and back in str(told.value):  # the way back that is told leads there
        user(applied.root, *back.split())
        assert not any(name in before for name in export.export(applied.root, patches).removed)


# --- what somebody did in the tree is never thrown away unasked ---


def change_series(patches: Path) -> model.Series:
    """As after a pull: the last patch is gone."""
    (patches / "series").write_text("Change-line-20.patch\n")
    (patches / "Add-a-header.patch").unlink()
    return model.read(patches)


def stash(root: Path) -> None:
    (root / "setup.py").write_text("mine\n")
    user(root, "stash")


def branch(root: Path) -> None:
    user(root, "checkout", "--quiet", "-b", "mine")
    user(root, "commit", "--quiet", "--allow-empty", "-m", "Mine")
    user(root, "checkout", "--quiet", "series")


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (stash, r"has stashes or linked work trees:\n.*WIP"),
        (
            lambda root: user(root, "worktree", "add", "--detach", str(root.parent / "linked")),
            "linked work tree linked",
        ),
        (branch, r"commits that are in no patch:\n.*Mine"),
        (rebase_in_progress, "in the middle of a rebase"),
        (
            lambda root: user(root, "reset", "--quiet", "--hard", "HEAD~1"),
            r"lacks the last 1 of the commits .*git reset",
        ),
        (older, "HEAD is on no branch: .* checkout series"),
    ],
)
def test_a_changed_series_does_not_replace_a_tree_that_holds_work(
    patches: Path, applied: tree.Tree, act: Callable[[Path], None], expected: str
) -> None:
    act(applied.root)
    changed = change_series(patches)
    with pytest.raises(SeriesError, match=expected):
        apply(changed, applied.root)
    assert apply(changed, applied.root, reset=True).commit != applied.commit


def test_a_folder_that_is_not_ours_is_not_replaced(series: model.Series, tmp_path: Path) -> None:
    for name in ("file", "folder"):
        path = tmp_path / name
        path.write_text("mine\n") if name == "file" else write_files(path, {"notes": "mine\n"})
        with pytest.raises(SeriesError, match="nothing that nox -s apply made"):
            apply(series, path)
    assert (tmp_path / "folder/notes").read_text() == "mine\n"


def test_a_tree_of_an_older_version_of_this_program_is_replaced_when_nothing_is_lost(
    series: model.Series, applied: tree.Tree
) -> None:
    marker = applied.root / ".git/series.json"
    marker.write_text(
        json.dumps({"format": 1, "digest": "x", "base": applied.base, "commit": applied.commit})
    )
    with pytest.raises(SeriesError, match="nothing was exported"):
        export.export(applied.root, series.folder)
    stash(applied.root)
    with pytest.raises(SeriesError, match="has stashes"):
        apply(series, applied.root)
    user(applied.root, "stash", "drop")
    assert apply(series, applied.root) == applied
    assert json.loads(marker.read_text())["format"] == 3


def test_a_pulled_series_replaces_an_untouched_tree(
    patches: Path, applied: tree.Tree, tmp_path: Path
) -> None:
    shorter = apply(change_series(patches), tmp_path / "source")
    assert shorter.commit == Repository(applied.root, SeriesError).resolve("HEAD") != applied.commit


def test_exported_commits_outlive_a_series_that_was_put_back(patches: Path, applied: tree.Tree) -> None:
    """After export, git checkout in the repository above takes patches/ back; the tree has the only copy then."""
    before = content(patches)
    user(applied.root, "tag", "keep-me")
    user(applied.root, "commit", "--quiet", "--amend", "-m", message("Add my header"))
    export.export(applied.root, patches)
    exported = Repository(applied.root, SeriesError).resolve("HEAD")
    for path in patches.iterdir():
        path.unlink()
    for name, data in before.items():
        (patches / name).write_bytes(data)
    apply(model.read(patches), applied.root)
    repository = Repository(applied.root, SeriesError)
    kept = repository.run(
        "for-each-ref", "--format=%(refname) %(objectname)", "refs/replaced", writes=False
    ).splitlines()
    assert [line.split()[1] for line in kept if line.split()[0].endswith("/HEAD")] == [exported]
    assert [line for line in kept if "/tags/keep-me" in line]
    apply(model.read(patches).upto(1), applied.root, of=2)
    assert exported in repository.run(
        "for-each-ref", "--format=%(objectname)", "refs/replaced", writes=False
    ), "kept from tree to tree"


def test_what_was_not_committed_outlives_a_reset(patches: Path, applied: tree.Tree) -> None:
    write_files(applied.root, {"setup.py": "mine\n", "new.py": "mine too\n"})
    apply(model.read(patches), applied.root, reset=True)
    repository = Repository(applied.root, SeriesError)
    (kept,) = [
        line
        for line in repository.run(
            "for-each-ref", "--format=%(refname)", "refs/replaced", writes=False
        ).splitlines()
        if "uncommitted" in line
    ]
    assert repository.read(f"{kept}:setup.py") == b"mine\n"
    assert repository.read(f"{kept}:new.py") == b"mine too\n"
    assert repository.resolve("HEAD") == applied.commit


def test_looking_at_a_series_neither_needs_nor_touches_a_tree_with_work_in_it(
    series: model.Series, tmp_path: Path
) -> None:
    assert tree.reusable(series, PIN, tmp_path / "source") is None
    applied = apply(series, tmp_path / "source")
    assert tree.reusable(series, PIN, applied.root) == applied
    assert tree.reusable(series.upto(1), PIN, applied.root) is None
    write_files(applied.root, {"setup.py": "mine\n"})
    assert tree.reusable(series, PIN, applied.root) is None
    assert (applied.root / "setup.py").read_text() == "mine\n"


def test_a_folder_that_a_killed_write_left_is_swept_by_the_next(patches: Path, tmp_path: Path) -> None:
    (tmp_path / ".patches.fa2-aside-abcd1234").mkdir()
    export.write_folder(patches, {"Add-a-header.patch": (patches / "Add-a-header.patch").read_bytes()})
    assert not (tmp_path / ".patches.fa2-aside-abcd1234").exists()


def test_what_killed_runs_left_beside_a_tree_is_swept(make_series: Make, tmp_path: Path) -> None:
    (tmp_path / ".source.fa2-aside-abcd1234").mkdir()
    tree.apply(model.read(make_series(*TWO)), PIN, checkout_of(BASE), tmp_path / "source")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["patches", "source"]


def test_a_tree_that_somebody_moved_away_stays(series: model.Series, tmp_path: Path) -> None:
    for name in ("source.previous", "source.original"):
        apply(series, tmp_path / "source").root.rename(tmp_path / name)
    apply(series, tmp_path / "source")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "patches",
        "source",
        "source.original",
        "source.previous",
    ]


def test_stashes_of_a_tree_that_is_replaced_are_kept(series: model.Series, applied: tree.Tree) -> None:
    for text in ("mine\n", "mine too\n"):
        write_files(applied.root, {"setup.py": text})
        user(applied.root, "stash")
    repository = Repository(applied.root, SeriesError)
    apply(series, applied.root, reset=True)
    kept = repository.run(
        "for-each-ref", "--format=%(refname)", "refs/replaced/*/stashes/*", writes=False
    ).split()
    assert [repository.read(f"{name}:setup.py") for name in kept] == [b"mine too\n", b"mine\n"]


@pytest.mark.parametrize(
    "ref", ["refs/heads/uncommitted", "refs/heads/uncommitted/x", "refs/series/aborted/x"]
)
def test_commits_of_every_name_outlive_a_reset_beside_what_was_not_committed(
    series: model.Series, applied: tree.Tree, ref: str
) -> None:
    repository = Repository(applied.root, SeriesError)
    mine = user(applied.root, "commit-tree", "-p", "HEAD", "-m", "mine", "HEAD^{tree}").strip()
    user(applied.root, "update-ref", ref, mine)
    write_files(applied.root, {"setup.py": "mine\n"})
    apply(series, applied.root, reset=True)
    kept = repository.run("for-each-ref", "--format=%(objectname) %(refname)", writes=False)
    assert mine in kept
    (loose,) = re.findall(r"(?m) (refs/replaced/[^/]+/uncommitted)$", kept)
    assert repository.read(f"{loose}:setup.py") == b"mine\n"
    if ref.startswith("refs/series"):  # what an edit that was dropped told
        assert repository.resolve(ref) == mine


def test_commits_of_linked_work_trees_outlive_a_reset(
    series: model.Series, applied: tree.Tree, tmp_path: Path
) -> None:
    user(applied.root, "worktree", "add", "--quiet", "--detach", str(tmp_path / "linked"))
    write_files(tmp_path / "linked", {"setup.py": "mine\n"})
    user(tmp_path / "linked", "commit", "--quiet", "--all", "--message=mine")
    mine = Repository(tmp_path / "linked", SeriesError).resolve("HEAD")
    apply(series, applied.root, reset=True)
    kept = Repository(applied.root, SeriesError).run(
        "for-each-ref", "--format=%(objectname)", "refs/replaced/*/linked/*", writes=False
    )
    assert mine in kept.split()


def test_a_tree_that_cannot_be_swapped_stays_and_the_error_says_what_to_do(
    series: model.Series,
    applied: tree.Tree,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in the lower layer of an overlay, where the kernel gives EXDEV."""

    class Libc:
        @staticmethod
        def renameat2(*_: object) -> int:
            ctypes.set_errno(errno.EXDEV)
            return -1

    with monkeypatch.context() as during:
        during.setattr(ctypes, "CDLL", lambda *_, **__: Libc)
        with pytest.raises(SeriesError, match="Invalid cross-device link") as caught:
            apply(series, applied.root, reset=True)
    assert "made anew" not in capsys.readouterr().out
    assert Repository(applied.root, SeriesError).resolve("HEAD") == applied.commit
    subprocess.run(["sh", "-c", str(caught.value).partition("where it can be: ")[2]], check=True)
    assert apply(series, applied.root).commit == applied.commit


def test_an_interruption_at_the_end_of_apply_loses_no_commit(
    series: model.Series, applied: tree.Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(applied.root, {"setup.py": "mine\n"})
    user(applied.root, "commit", "--quiet", "--all", "--message=mine")
    mine = Repository(applied.root, SeriesError).resolve("HEAD")
    remove = shutil.rmtree

    def interrupted(path: Path, **options: Any) -> None:
        if (Path(path) / ".git").exists() or (Path(path) / "tree/.git").exists():
            raise KeyboardInterrupt
        remove(path, **options)

    with monkeypatch.context() as during:
        during.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            apply(series, applied.root, reset=True)
    apply(series, applied.root)
    repository = Repository(applied.root, SeriesError)
    assert repository.attempt("cat-file", "-e", mine)[0] == 0
    assert repository.resolve("HEAD") == applied.commit


def test_a_file_written_while_it_is_built_from_is_noticed(
    series: model.Series, applied: tree.Tree, tmp_path: Path
) -> None:
    apply(series, tmp_path / "made").check_unchanged()
    apply(series, tmp_path / "made").check_unchanged()  # taken as it is
    header = applied.root / "csrc/flash_attn/src/fork.h"
    a_tick(tmp_path)
    (header.parent / ".fork.h.swp").touch()
    applied.check_unchanged()
    (tmp_path / "mine.h").write_bytes(header.read_bytes())
    os.utime(tmp_path / "mine.h", (0, 0))
    (tmp_path / "mine.h").replace(header)  # with its own time
    with pytest.raises(SeriesError, match=r"src/fork\.h changed while it was being built from"):
        applied.check_unchanged()


def test_the_base_is_tagged_for_autosquash_and_a_fixup_that_is_not_folded_is_named(
    patches: Path, applied: tree.Tree
) -> None:
    write_files(applied.root, {"setup.py": EDITED_SETUP.replace("twenty", "XX")})
    user(applied.root, "commit", "--quiet", "--all", "--fixup", "HEAD~1")
    with pytest.raises(
        SeriesError, match=r"fixup! Change line 20 is not folded .*git rebase -i --autosquash base"
    ):
        export.export(applied.root, patches)
    user(applied.root, "rebase", "-q", "-i", "--autosquash", "base", GIT_SEQUENCE_EDITOR="true")
    assert export.export(applied.root, patches).written == ("Change-line-20.patch",)


def test_export_does_not_undo_a_patch_that_changed_meanwhile(patches: Path, applied: tree.Tree) -> None:
    user(applied.root, "commit", "--quiet", "--amend", "-m", message("Add a header"))
    change_a_message(patches)
    before = content(patches)
    with pytest.raises(SeriesError, match=r"changed since .* was applied from it: Change-line-20\.patch"):
        export.export(applied.root, patches)
    assert content(patches) == before


@pytest.mark.parametrize("part", [False, True])
def test_the_way_out_that_export_tells_keeps_one_s_commit(patches: Path, tmp_path: Path, part: bool) -> None:
    """Of a tree whose patches changed meanwhile, and of one that holds a part of the series."""
    whole = model.read(patches)
    applied = apply(whole.upto(1) if part else whole, tmp_path / "source", of=2)
    write_files(applied.root, {"csrc/flash_attn/src/more.h": "// more\n"})
    commit(applied.root, "-m", message("Add more"))
    if not part:
        change_a_message(patches)
    with pytest.raises(
        SeriesError, match="nox -s apply -- --reset, which keeps your commits, then git -C"
    ) as caught:
        export.export(applied.root, patches)
    apply(model.read(patches), applied.root, reset=True)
    command = re.search(r"git -C \S+ (cherry-pick [0-9a-f ]+)", str(caught.value))
    assert command is not None
    user(applied.root, *command[1].split())
    assert export.export(applied.root, patches).written == ("Add-more.patch", "series")


def test_after_an_export_the_tree_is_taken_as_it_is(
    patches: Path, applied: tree.Tree, tmp_path: Path
) -> None:
    write_files(applied.root, {"csrc/flash_attn/src/more.h": "// more\n"})
    commit(applied.root, "-m", message("Add more"))
    assert export.export(applied.root, patches) == export.Exported(("Add-more.patch", "series"), ())
    (applied.root / "left").write_text("untracked files of the user stay too\n")
    with pytest.raises(SeriesError, match="left"):
        apply(model.read(patches), applied.root)
    (applied.root / "left").unlink()
    again = apply(model.read(patches), applied.root)
    assert again.commit == Repository(applied.root, SeriesError).resolve("HEAD")
    elsewhere = apply(model.read(patches), tmp_path / "elsewhere")
    assert (again.commit, again.digest, again.sources) == (
        elsewhere.commit,
        elsewhere.digest,
        elsewhere.sources,
    ), "whoever made the commit"
    assert export.export(applied.root, patches, check=True) == NOTHING


def test_a_change_of_the_binding_is_none_of_the_kernels(make_series: Make, tmp_path: Path) -> None:
    """Nor is one of Python files; a change of a header is one of both."""
    api, header = "csrc/flash_attn/flash_api.cpp", "csrc/flash_attn/src/flash.h"
    base = BASE | {api: "int api;\n", header: "int flash;\n"}
    edits = {
        "none": ("setup.py", EDITED_SETUP),
        "binding": (api, "int other;\n"),
        "both": (header, "int other;\n"),
        "cutlass": (HEADER, "// other\n"),
    }
    trees = {}
    for name, (path, text) in edits.items():
        (tmp_path / name).mkdir()
        patches = make_series(("Change a file", {path: text}), base=base, folder=tmp_path / name)
        trees[name] = tree.apply(model.read(patches), PIN, checkout_of(base), tmp_path / name / "source")
    assert len({t.sources for t in trees.values()}) == 4
    assert trees["binding"].kernel_sources == trees["none"].kernel_sources
    assert len({t.kernel_sources for t in trees.values()}) == 3


def test_files_and_comments_of_others_stay(patches: Path, applied: tree.Tree) -> None:
    write_files(patches, {"README": "mine\n", "notes/a": "mine\n"})
    (patches / "series").write_text(
        "# top\nChange-line-20.patch\n\n# about the header\nAdd-a-header.patch  # short\n# end\n"
    )
    user(applied.root, "rebase", "--quiet", "--onto", applied.base, "HEAD~1")
    done = export.export(applied.root, patches)
    assert done == export.Exported(("series",), ("Change-line-20.patch",))
    assert (patches / "series").read_text() == "\n# about the header\nAdd-a-header.patch  # short\n# end\n"
    assert (patches / "notes/a").read_text() == (patches / "README").read_text() == "mine\n"


def test_a_patch_that_goes_or_moves_renames_no_other(make_series: Make, tmp_path: Path) -> None:
    """So that git log --follow shows a patch's history."""
    more = ("Add more", {"flash_attn/more.py": "more = 1\n"})
    patches = make_series(*TWO, more)
    names = ["Change-line-20.patch", "Add-a-header.patch", "Add-more.patch"]
    assert (patches / "series").read_text().split() == names
    applied = apply(model.read(patches), tmp_path / "source")
    order = 'sed -i "1{h;d};2{G}"'  # the first two change places
    user(applied.root, "-c", f"sequence.editor={order}", "rebase", "--quiet", "-i", applied.base)
    assert export.export(applied.root, patches) == export.Exported(("series",), ())
    assert (patches / "series").read_text().split() == [names[1], names[0], names[2]]


def test_two_commits_of_one_subject_are_told_apart_first(patches: Path, applied: tree.Tree) -> None:
    write_files(applied.root, {"flash_attn/more.py": "more = 1\n"})
    commit(applied.root, "-m", message("Add a header"))
    with pytest.raises(SeriesError, match=r"two commits would be Add-a-header\.patch; give one of them"):
        export.export(applied.root, patches)


def merge(root: Path) -> None:
    user(root, "checkout", "--quiet", "-b", "side", "HEAD~1")
    write_files(root, {"side": "x\n"})
    commit(root, "-m", message("Side"))
    user(root, "checkout", "--quiet", "series")
    user(root, "merge", "--quiet", "--no-edit", "side")


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (
            lambda root: user(root, "commit", "--quiet", "--amend", "-m", "Add a header"),
            r"Add-a-header\.patch: the message has no trailer Upstream-Status",
        ),
        (
            lambda root: user(root, "commit", "--quiet", "--allow-empty", "-m", message("Nothing")),
            r"Nothing changes no file",
        ),
        (merge, r"Merge branch 'side'.* is a merge"),
        (
            lambda root: user(root, "commit", "--quiet", "--amend", "-m", message("A\n\n---\nb")),
            r"line 3 of its message, '---', would come back as ''",
        ),
    ],
)
def test_a_commit_that_makes_no_patch_is_named(
    patches: Path, applied: tree.Tree, act: Callable[[Path], None], expected: str
) -> None:
    before = content(patches)
    act(applied.root)
    with pytest.raises(SeriesError, match=expected):
        export.export(applied.root, patches)
    assert content(patches) == before


def test_a_part_of_the_series_is_applied_and_not_exported(make_series: Make, tmp_path: Path) -> None:
    whole = model.read(make_series(*TWO))
    part = apply(whole.upto(1), tmp_path / "source", of=2)
    assert not (part.root / "csrc/flash_attn/src/fork.h").exists()
    with pytest.raises(SeriesError, match="holds the first 1 of 2 patches"):
        export.export(part.root, whole.folder)
    assert apply(whole, tmp_path / "source").commit != part.commit


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            lambda p: (p / "series").write_text("Add-a-header.patch\nChange-line-20.patch\n"),
            "another order",
        ),
        (lambda p: (p / "Stray.patch").write_text("x"), r"Stray\.patch would be removed"),
        (lambda p: (p / "Add-a-header.patch").write_text("x"), r"Add-a-header\.patch would change"),
    ],
)
def test_check_tells_content_order_and_stray_files(
    patches: Path, applied: tree.Tree, edit: Callable[[Path], object], expected: str
) -> None:
    edit(patches)
    with pytest.raises(SeriesError, match=expected):
        export.export(applied.root, patches, check=True)


names = st.sampled_from(["setup.py", "flash_attn/__init__.py", "flash_attn/a.py", "csrc/flash_attn/src/a.h"])
lines = st.lists(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12),
    min_size=1,
    max_size=8,
)
subjects = st.from_regex(r"Add [a-z]{1,12}( [a-zäé'\"/:*]{1,9}){0,9}", fullmatch=True)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    edits=st.lists(
        st.tuples(subjects, st.dictionaries(names, lines, min_size=1)),
        min_size=1,
        max_size=4,
        unique_by=lambda edit: re.sub(r"[^a-z]+", "-", edit[0]).strip("-"),  # as names are made of subjects
    )
)
def test_apply_and_export_are_each_other_s_inverse(
    make_series: Make, tmp_path: Path, edits: list[tuple[str, dict[str, list[str]]]]
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    # Each patch leaves a line of its own, so that none is empty.
    texts = [
        (s, {n: "\n".join([*ls, f"patch {i}"]) + "\n" for n, ls in files.items()})
        for i, (s, files) in enumerate(edits)
    ]
    patches = make_series(*texts, folder=folder)
    before = content(patches)
    applied = apply(model.read(patches), folder / "source")
    assert export.export(applied.root, patches) == NOTHING
    repository = Repository(applied.root, SeriesError)
    export.write_folder(folder / "again", formatting.exported_patches(repository, applied.base))
    assert content(folder / "again") == before == content(patches)
    assert apply(model.read(folder / "again"), folder / "other").commit == applied.commit


def test_check_of_an_old_tree_does_not_advise_what_export_would_refuse(
    patches: Path, applied: tree.Tree
) -> None:
    """After a rebase build/source is still of the patches before it."""
    change_a_message(patches, "Add-a-header.patch")
    with pytest.raises(SeriesError, match=r"would change.*nox -s apply -- --reset") as caught:
        export.export(applied.root, patches, check=True)
    assert "nox -s export" not in str(caught.value)


def test_a_damaged_note_of_what_was_applied_is_refused_by_file_and_key(
    series: model.Series, applied: tree.Tree
) -> None:
    (applied.root / ".git/series.json").write_text('{"format": 3, "pin": 3}')
    with pytest.raises(SeriesError, match=r"series\.json is damaged: pin: .*apply -- --reset"):
        apply(series, applied.root)
    assert apply(series, applied.root, reset=True).commit == applied.commit

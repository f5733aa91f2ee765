"""Our own files carried into a tree that is there: what it may be built from after it, and what it keeps."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from scripts.base import files
from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import kept_commits, uncommitted
from tests.unit import test_own
from tests.unit.conftest import commit, message, user, write_files
from tests.unit.test_own import HEADER, MODULE, OWN, applied, exported, held

if TYPE_CHECKING:
    from pathlib import Path

place = test_own.place
OTHER = {HEADER: "// other\n"}


def kept(root: Path, name: str) -> set[str]:
    """What a file is in the commits that refs hold."""
    commits = user(root, "rev-list", "--all").split()
    return {
        user(root, "show", f"{one}:{name}")
        for one in commits
        if name in Repository(root, SeriesError).files(one)
    }


def test_a_carried_tree_can_be_built_from(place: Path) -> None:
    write_files(place / "fork", {"flash_attn_2_cuda/__init__.py": "a = 1\n"})
    applied(place)
    write_files(place / "fork", OTHER)
    carried = applied(place)
    carried.check_unchanged()
    for name in ("setup.py", HEADER, "flash_attn_2_cuda/__init__.py"):
        before = (carried.root / name).read_text()
        tree = applied(place)
        write_files(carried.root, {name: "changed\n"})
        with pytest.raises(SeriesError, match=rf"{name} changed while it was being built from"):
            tree.check_unchanged()
        write_files(carried.root, {name: before})


@pytest.mark.parametrize(
    "way",
    [["branch", "mine"], ["checkout", "-q", "--detach"], ["checkout", "-q", "-b", "work"]],
    ids=["branch", "detached", "other-branch"],
)
@pytest.mark.parametrize("how", ["carried", "exported"])
def test_what_stands_on_the_tree_that_was_blocks_nothing(place: Path, way: list[str], how: str) -> None:
    root = applied(place).root
    former = Repository(root, SeriesError).resolve("HEAD")
    user(root, *way)
    if how == "carried":
        write_files(place / "fork", OTHER)
        applied(place)
    else:
        write_files(root, OTHER)
        if "--detach" in way:
            with pytest.raises(SeriesError, match=r"HEAD is on no branch: .* checkout -B series"):
                exported(place)
            user(root, "checkout", "-q", "-B", "series")  # as the error says
        exported(place)
    assert applied(place).commit == applied(place, "anew").commit
    assert OWN[HEADER] in kept(root, HEADER)
    # Somebody's work counts, wherever it stands.
    user(root, "checkout", "-q", "-B", "elsewhere", former)
    write_files(root, {"setup.py": "mine\n"})
    commit(root, "-m", message("Say mine"))
    user(root, "checkout", "-q", "--detach", applied(place, "anew").commit)
    with pytest.raises(SeriesError, match=r"commits that are in no patch:\n +\w+ Say mine"):
        applied(place)


def test_what_was_exported_and_taken_back_is_kept(place: Path) -> None:
    root = applied(place).root
    write_files(root, {MODULE: "precious = 2\n"})
    exported(place)
    write_files(place / "fork", OWN)  # git checkout fork
    applied(place)
    assert held(root)[MODULE] == OWN[MODULE]
    assert kept(root, MODULE) == {OWN[MODULE], "precious = 2\n"}


@pytest.mark.parametrize("after", ["the copy", "the reset", "the copy, and it cannot be kept"])
def test_what_is_saved_while_a_carry_runs_is_kept(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: str,
) -> None:
    root = applied(place).root
    write_files(place / "fork", OTHER)
    copytree, differences = shutil.copytree, uncommitted.differences
    moments = iter((after,))

    def save(moment: str) -> None:
        # As an editor that renames: else the file is the new tree's too, and apply says that it changed.
        if moment == after and next(moments, None):
            (root / "setup.py").unlink()
            write_files(root, {"setup.py": "mine\n", "flash_attn/mine.py": "mine\n"})

    def copied(*arguments: Any, **named: Any) -> object:
        done = copytree(*arguments, **named)
        save(after if after.startswith("the copy") else "")
        return done

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def compared(repository: Repository) -> list[str]:
        if repository.root != root:
            save("the reset")
        return differences(repository)

    with monkeypatch.context() as during:
        during.setattr(shutil, "copytree", copied)
        during.setattr(uncommitted, "differences", compared)
        if after.endswith("kept"):
            during.setattr(kept_commits, "keep_commits", interrupted)
            with pytest.raises(KeyboardInterrupt):
                applied(place)
            assert held(root) == held(root) | {"setup.py": "mine\n", "flash_attn/mine.py": "mine\n"}
            return
        made = applied(place)
    assert made.commit == applied(place, "anew").commit
    for name in ("setup.py", "flash_attn/mine.py"):
        assert "mine\n" in kept(root, name)


def test_a_file_that_is_written_in_place_while_a_carry_runs_is_told(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = applied(place).root
    write_files(place / "fork", OTHER)
    exchange = files.exchange

    def late(new: Path, old: Path) -> None:
        write_files(root, {"setup.py": "mine\n"})
        exchange(new, old)

    monkeypatch.setattr(files, "exchange", late)
    with pytest.raises(SeriesError, match=r"changed while it was made:\n M setup\.py"):
        applied(place)
    assert (root / "setup.py").read_text() == "mine\n"


@pytest.mark.parametrize("how", ["attributes", "sparse", "--skip-worktree", "--assume-unchanged"])
def test_settings_of_the_tree_do_not_change_what_is_carried(place: Path, how: str) -> None:
    root = applied(place).root
    (root / ".git/info").mkdir(exist_ok=True)
    if how == "attributes":
        (root / ".git/info/attributes").write_text("*.h text eol=crlf\n")
    elif how == "sparse":
        user(root, "config", "core.sparseCheckout", "true")
        (root / ".git/info/sparse-checkout").write_text("/*\n!csrc/flash_attn/src/fork_new.h\n")
    else:
        user(root, "update-index", how, HEADER)
    write_files(place / "fork", OTHER | {"csrc/flash_attn/src/fork_new.h": "// new\n"})
    carried = applied(place)
    assert uncommitted.differences(Repository(carried.root, SeriesError)) == []
    assert held(carried.root) == held(applied(place, "anew").root)


def test_a_tree_s_own_repository_is_no_link(place: Path) -> None:
    """Git appends to its logs, and a user's git may write into other files in place."""
    root = applied(place).root
    shutil.copytree(root, place / "before", symlinks=True)
    keep = place / "keep"
    keep.mkdir()
    shared = [p for p in (root / ".git").rglob("*") if p.is_file() and "objects" not in p.parts]
    for number, path in enumerate(shared):
        (keep / str(number)).hardlink_to(path)
    write_files(place / "fork", OTHER)
    applied(place)
    for number, path in enumerate(shared):
        old = place / "before" / path.relative_to(root)
        assert path.name == "seen" or (keep / str(number)).read_bytes() == old.read_bytes(), path

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.base import files, layout
from scripts.base.errors import ActionNeeded, SeriesError, UsageError
from scripts.base.git import Repository
from scripts.series import edit, edit_state, export, model, tree, uncommitted
from scripts.series.edit import Editing
from scripts.series.upstream import move
from tests.unit import forked
from tests.unit.conftest import (
    BASE,
    EDITED_SETUP,
    PIN,
    Command,
    Make,
    TreeOf,
    checkout_of,
    message,
    user,
    write_files,
)

HEADER = "csrc/flash_attn/src/fork.h"
THREE = [
    ("Change line 20", {"setup.py": EDITED_SETUP}),
    ("Add a header", {HEADER: "#pragma once\n"}),
    ("Change line 30", {"setup.py": EDITED_SETUP.replace("line 30\n", "line thirty\n")}),
]
AGAIN = ("Change line 20 again", {"setup.py": THREE[2][1]["setup.py"].replace("line twenty\n", "line 20b\n")})


@pytest.fixture
def root(make_series: Make, tree_of: TreeOf) -> Path:
    """A tree with a series whose last patch changes the line that its first does."""
    return tree_of(model.read(make_series(*THREE, AGAIN))).root


def editing(root: Path) -> Editing:
    return Editing(root, root.parent / "resolutions")


def waits(root: Path, why: str) -> None:
    """The refresh is refused, for this reason."""
    with pytest.raises(ActionNeeded, match=why):
        editing(root).refresh()


def state(root: Path) -> tuple[str, ...]:
    """Where a tree stands: HEAD, the branches, the files."""
    repository = Repository(root, SeriesError)
    refs = repository.run("for-each-ref", "--format=%(refname) %(objectname)", "refs/heads", writes=False)
    head = (root / ".git/HEAD").read_text()
    return head, refs, repository.resolve("HEAD"), *uncommitted.differences(repository)


def change(root: Path, old: str, new: str) -> None:
    path = root / "setup.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def hide_a_change(root: Path) -> None:
    user(root, "update-index", "--assume-unchanged", "setup.py")
    change(root, "line twenty\n", "line XX\n")


def begin_conflict(root: Path) -> None:
    editing(root).begin("1")
    change(root, "line twenty\n", "line XX\n")
    with pytest.raises(
        ActionNeeded, match=r"patch 4 of 4, Change-line-20-again\.patch: conflict with"
    ) as stop:
        editing(root).refresh()
    for part in ("setup.py:20: conflict", "nox -s refresh", "--skip", "nox -s edit -- --abort"):
        assert part in str(stop.value)


def resolve(root: Path) -> None:
    text = (root / "setup.py").read_text()
    before, _, rest = text.partition("<<<<<<< ")
    (root / "setup.py").write_text(before + "line XXb\n" + rest.partition(">>>>>>> ")[2].partition("\n")[2])


def test_changes_go_into_the_patch_and_later_ones_are_replayed(root: Path) -> None:
    begun = editing(root).begin("header")
    assert (begun.name, (root / "setup.py").read_text()) == ("Add-a-header.patch", EDITED_SETUP)
    assert not edit.usable(root, root.parent / "patches")
    write_files(root, {HEADER: "#pragma once\nint more;\n", "csrc/flash_attn/src/new.h": "// new\n"})
    waits(root, r"git does not know: csrc/flash_attn/src/new\.h.*nox -s refresh")
    user(root, "add", "--all")
    assert "2 later patches stand on it" in editing(root).refresh()
    assert (root / ".git/HEAD").read_text() == "ref: refs/heads/series\n"
    patches = root.parent / "patches"
    assert export.export(root, patches).written == ("Add-a-header.patch",)
    assert "+int more;" in (patches / "Add-a-header.patch").read_text()
    assert tree.reusable(model.read(patches), PIN, root) is not None


def test_a_second_patch_is_edited_before_the_first_is_exported(root: Path) -> None:
    editing(root).begin("header")
    write_files(root, {HEADER: "#pragma once\nint more;\n"})
    editing(root).refresh()
    assert edit.usable(root, root.parent / "patches")
    editing(root).begin("line-30")
    change(root, "line thirty\n", "line XXX\n")
    editing(root).refresh()
    written = export.export(root, root.parent / "patches").written
    assert {"Add-a-header.patch", "Change-line-30.patch"} <= {*written}


def test_a_message_is_amended_with_git_and_checked(root: Path) -> None:
    editing(root).begin("2")
    user(root, "commit", "--quiet", "--amend", "-m", "Add a header")
    waits(root, r"(?s)no trailer Upstream-Status.*commit --amend\), then nox -s refresh")
    user(root, "commit", "--quiet", "--amend", "-m", message("Add my header"))
    editing(root).refresh()
    assert "Add-my-header.patch" in export.export(root, root.parent / "patches").written


def test_an_edit_that_changes_nothing_leaves_the_tree_as_it_was(root: Path) -> None:
    before = state(root)
    editing(root).begin("2")
    assert "Nothing was changed" in editing(root).refresh()
    assert state(root) == before


def test_a_conflict_stops_with_help_and_goes_on_once_it_is_resolved(root: Path) -> None:
    begin_conflict(root)
    waits(root, r"setup\.py:20: a conflict of Change-line-20-again\.patch is not")
    assert "    setup.py: conflict" in editing(root).standing()
    resolve(root)
    editing(root).refresh()
    written = export.export(root, root.parent / "patches").written
    assert written == ("Change-line-20-again.patch", "Change-line-20.patch", "Change-line-30.patch")


def test_a_resolution_is_remembered_for_the_next_edit(root: Path) -> None:
    begin_conflict(root)
    resolve(root)
    editing(root).refresh()
    Repository(root, SeriesError).run("reset", "--quiet", "--hard", "refs/series/before-edit")
    editing(root).begin("1")
    change(root, "line twenty\n", "line XX\n")
    waits(root, r"\+line XXb\n(.*\n)*.*nox -s refresh -- --use-remembered")
    assert "stand on it" in editing(root).use_remembered()
    assert "line XXb\n" in (root / "setup.py").read_text()


def test_a_patch_that_stopped_is_left_out_when_asked_for(root: Path) -> None:
    with pytest.raises(UsageError, match="no patch is being edited"):
        editing(root).skip()
    begin_conflict(root)
    editing(root).skip()
    assert export.export(root, root.parent / "patches").removed == ("Change-line-20-again.patch",)


@pytest.mark.parametrize("when", ["begun", "changed", "amended", "stopped", "resolved"])
def test_abort_goes_back_to_exactly_what_was_and_keeps_what_was_changed(root: Path, when: str) -> None:
    before = state(root)
    if when in ("stopped", "resolved"):
        begin_conflict(root)
    else:
        editing(root).begin("1")
    if when in ("changed", "amended"):
        change(root, "line twenty\n", "line XX\n")
        write_files(root, {"mine.py": "mine\n"})
    if when == "amended":
        user(root, "commit", "--quiet", "--all", "--amend", "--no-edit")
    if when == "resolved":
        resolve(root)
    told = editing(root).abort()
    assert state(root) == before
    assert not edit_state.under_way(root)
    kept = told.partition("show ")[2]
    assert bool(kept) == (when != "begun")
    if kept:
        text = Repository(root, SeriesError).read(f"{kept}:setup.py").decode()
        assert ("line XXb\n" if when == "resolved" else "line XX\n") in text
    if when in ("changed", "amended"):
        assert Repository(root, SeriesError).read(f"{kept}:mine.py") == b"mine\n"


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda root: user(root, "commit", "--quiet", "--allow-empty", "-m", "mine"), r"reset --soft \w{12}"),
        (lambda root: user(root, "checkout", "--quiet", "HEAD~1"), "it is another commit"),
        (lambda root: (root / "setup.py").write_text(BASE["setup.py"]), "would change no file"),
        (hide_a_change, r"would not get into Change-line-20\.patch:\n M setup\.py"),
    ],
)
def test_what_refresh_cannot_take_is_refused_and_stays(
    root: Path, act: Callable[[Path], object], expected: str
) -> None:
    before = state(root)
    editing(root).begin("1")
    act(root)
    text = (root / "setup.py").read_text()
    waits(root, expected)
    assert (root / "setup.py").read_text() == text
    editing(root).abort()
    assert state(root) == before


def test_a_tree_in_an_edit_is_neither_exported_nor_replaced_nor_edited_again(root: Path) -> None:
    editing(root).begin("1")
    patches = root.parent / "patches"
    with pytest.raises(SeriesError, match="in the middle of an edit of a patch; nox -s refresh, or"):
        export.export(root, patches)
    with pytest.raises(SeriesError, match="in the middle of an edit"):
        tree.apply(model.read(patches), PIN, checkout_of(BASE), root)
    with pytest.raises(UsageError, match=r"Change-line-20\.patch is being edited: nox -s refresh"):
        editing(root).begin("2")


def test_a_wrong_name_begins_nothing(root: Path) -> None:
    before = state(root)
    with pytest.raises(SeriesError, match="'nothing' names no patch"):
        editing(root).begin("nothing")
    assert state(root) == before
    assert not edit_state.under_way(root)


def test_a_damaged_note_is_an_error_that_says_how_to_get_out(root: Path) -> None:
    editing(root).begin("1")
    (root / ".git/series-edit.json").write_text("{")
    with pytest.raises(SeriesError, match=r"series-edit\.json is damaged: .*apply -- --reset"):
        editing(root).refresh()


# --- kill -9 ---


def edit_and_die(root: Path, end: int) -> None:
    """Edit the second patch, and end without a word before the step of this number that writes."""
    steps = itertools.count(1)

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if named.get("writes", True) and next(steps) == end:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return wrapped

    setattr(files, "write", mortal(files.write))  # noqa: B010
    setattr(move, "pick", mortal(move.pick))  # noqa: B010
    setattr(Repository, "run", mortal(Repository.run))  # noqa: B010
    if not edit_state.under_way(root):
        editing(root).begin("2")
    write_files(root, {HEADER: "#pragma once\nint more;\n"})
    editing(root).refresh()


def test_an_edit_that_is_killed_anywhere_goes_on_and_ends_the_same_or_is_aborted(
    make_series: Make, tree_of: TreeOf, tmp_path: Path
) -> None:
    root = tree_of(model.read(make_series(*THREE))).root
    before = state(root)
    whole = shutil.copytree(root, tmp_path / "whole", symlinks=True)
    editing(whole).begin("2")
    write_files(whole, {HEADER: "#pragma once\nint more;\n"})
    editing(whole).refresh()
    after, kills = state(whole), 0
    for place in itertools.count(1):
        killed = shutil.copytree(root, tmp_path / f"killed-{place}", symlinks=True)
        process = forked.context().Process(target=edit_and_die, args=(killed, place))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        if edit_state.under_way(killed):
            aborted = shutil.copytree(killed, tmp_path / f"aborted-{place}", symlinks=True)
            editing(aborted).abort()
            assert state(aborted) == before
            told = editing(killed).refresh()
            if "ready to be edited" in told or "Nothing was changed" in told:
                if not edit_state.under_way(killed):
                    editing(killed).begin("2")
                write_files(killed, {HEADER: "#pragma once\nint more;\n"})
                editing(killed).refresh()
        elif state(killed) == before:
            continue
        assert state(killed) == after
    assert kills > 10


def test_the_commands_tell_where_an_edit_stands(
    root: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in (("BUILD", root.parent), ("SOURCE", root)):
        monkeypatch.setattr(layout, name, path)
    assert "no patch is being edited; nox -s edit -- PATCH begins" in command("edit").out
    assert json.loads(command("edit", "--json").out)["editing"] is False
    outside = command("refresh")
    assert (outside.status, outside.err) == (2, "✗ no patch is being edited; nox -s edit -- PATCH begins.\n")
    begin_conflict(root)
    assert "patch (4/4) Change-line-20-again.patch is next" in command("edit").out
    dropped = command("edit", "--abort")
    assert dropped.status == 0
    assert "is as it was. What was changed is kept: git -C" in dropped.out


def test_what_is_to_be_typed_names_another_upstream() -> None:
    words = edit_state.Words(Path("build/source-flash-attn-4"))
    assert words.skip == "nox -s refresh -- --upstream flash-attn-4 --skip"
    assert words.abort == "nox -s edit -- --upstream flash-attn-4 --abort"
    assert edit_state.Words(Path("build/source")).refresh == "nox -s refresh"


def test_an_edit_is_not_begun_in_a_rebase(
    root: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in (("BUILD", root.parent), ("SOURCE", root)):
        monkeypatch.setattr(layout, name, path)
    write_files(root.parent, {"rebase/state.json": ""})
    assert "a rebase is under way; finish it" in command("edit", "1").err

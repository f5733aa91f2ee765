from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.base import files
from scripts.base.errors import ActionNeeded, SeriesError, UsageError
from scripts.base.git import Repository
from scripts.commands import rebase as rebase_command
from scripts.series import affected_kernels, changes, export, lint, model
from scripts.series.rebase import status as rebase_status
from scripts.series.rebase.state import Report
from scripts.series.rebase.steps import Rebase
from scripts.series.upstream import move
from scripts.series.upstream import words as upstream_words
from scripts.source import matrix, pin
from scripts.source.releases import Release
from tests.unit import forked
from tests.unit.conftest import (
    BASE,
    ROOT,
    Edit,
    Kept,
    Make,
    checkout_of,
    commit,
    fill_repository,
    user,
    write_files,
)

LIB, HEADER = "flash_attn/lib.py", "csrc/flash_attn/src/fork.h"
FILES = BASE | {
    LIB: "".join(f"value_{i} = {i}\n" for i in range(30)),
    "csrc/flash_attn/src/flash.h": "struct flash;\n",
}


def with_line(number: int, text: str, files: dict[str, str] = FILES) -> dict[str, str]:
    return {LIB: files[LIB].replace(f"value_{number} = {number}\n", text)}


EDIT = ("Change the tenth value", with_line(10, "value_10 = compute_ten()\n"), f"symbol compute_ten in {LIB}")
ADD = (
    "Add a header",
    {HEADER: "#pragma once\ninline int fork() { return 1; }\n"},
    f"symbol fork in {HEADER}",
)
LAST = (
    "Change the last value",
    with_line(29, "value_29 = compute_last()\n", FILES | EDIT[1]),
    f"symbol compute_last in {LIB}",
)
SERIES = (EDIT, ADD, LAST)
UPSTREAM = with_line(10, "value_10 = ten\n")  # conflicts with EDIT
MOVED = {LIB: "# new\n" + FILES[LIB]}
NEW_HASH = "9" * 64
SERIES_FOLDER = "patches/flash-attn"


@pytest.fixture
def repository_of(make_series: Make, tmp_path: Path, kept: Kept) -> Callable[..., Path]:
    """A repository like this one, with a series on FILES."""

    def make(*edits: Edit) -> Path:
        def fill(root: Path) -> None:
            fill_repository(root, make_series, edits, FILES)
            (root / ".gitignore").write_text("/build/\n/flag-*\n")
            user(root, "init", "--quiet")
            commit_state(root)

        made = kept(f"a repository of {len(edits)}", fill)
        return shutil.copytree(made, tmp_path / "repository", symlinks=True)

    return make


@pytest.fixture
def repository(repository_of: Callable[..., Path]) -> Path:
    """One with three patches."""
    return repository_of(*SERIES)


def commit_state(root: Path) -> None:
    commit(root, "--allow-empty", "-m", "state")


def after(kept: Kept, name: str, repository: Path, act: Callable[[Path], object]) -> Path:
    """A repository after something that is done once: a copy."""

    def make(folder: Path) -> None:
        act(repository)
        repository.rename(folder / "repository")

    made = kept(name, make) / "repository"
    return shutil.copytree(made, repository, symlinks=True, dirs_exist_ok=True)


def stop(root: Path) -> None:
    with pytest.raises(ActionNeeded):
        start(root, UPSTREAM)


@pytest.fixture
def stopped(repository: Path, kept: Kept) -> Path:
    """The same, in a rebase that EDIT's conflict stopped."""
    return after(kept, "a rebase that stopped", repository, stop)


def release(root: Path, new: dict[str, str], version: str = "9.9.9", **pin: str) -> Release:
    known = matrix.load(root / "wheel_matrix.toml").upstream
    unknown = {
        "version": version,
        "tag": f"v{version}",
        "commit": "unknown",
        "cutlass": "unknown",
        "sdist_sha256": NEW_HASH,
    }
    return Release(known.model_copy(update=unknown | pin), checkout_of(FILES | new), "a fixture")


def start(root: Path, new: dict[str, str], **pin: str) -> Report:  # version, commit, …
    loaded = matrix.load(root / "wheel_matrix.toml")
    return Rebase(root, root / "build/rebase").start(
        loaded, model.read(root / SERIES_FOLDER), checkout_of(FILES), release(root, new, **pin)
    )


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def resume(root: Path) -> Rebase:
    """As the next command does: from what lies on disk."""
    return Rebase(root, root / "build/rebase")


def waits(root: Path, why: str) -> None:
    """Going on is refused, for this reason."""
    with pytest.raises(ActionNeeded, match=why):
        resume(root).proceed()


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in [*(root / SERIES_FOLDER).iterdir(), root / "wheel_matrix.toml", root / "CHANGES.md"]
    }


def change_a_patch(root: Path) -> None:
    path = root / SERIES_FOLDER / "Add-a-header.patch"
    path.write_text(path.read_text().replace("Because", "Since"))


def resolve(root: Path, text: str = "value_10 = compute_ten(ten)\n") -> None:
    path = root / "build/rebase/source" / LIB
    content = path.read_text()
    before, _, rest = content.partition("<<<<<<< ")
    path.write_text(before + text + rest.partition(">>>>>>> ")[2].partition("\n")[2])


def test_a_series_that_moves_is_moved_whole(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = start(repository, MOVED)
    assert [d.outcome for d in report.done] == ["offset", "clean", "offset"]
    told = [line.strip() for line in capsys.readouterr().out.splitlines()]
    names = [f"{n}/3 {done.patch}: {done.outcome}" for n, done in enumerate(report.done, 1)]
    assert [line for line in told if "/3 " in line] == names
    loaded = matrix.load(repository / "wheel_matrix.toml")
    assert (loaded.upstream.version, loaded.upstream.sdist_sha256, loaded.upstream.commit) == (
        "9.9.9",
        NEW_HASH,
        "unknown",
    )
    assert loaded.releases["2.8.3.post1"].startswith("55d5103e")
    before = (ROOT / "wheel_matrix.toml").read_text().splitlines()
    after = loaded.path.read_text().splitlines()
    assert [line for line in after if line not in before] == [
        'version = "9.9.9"',
        'tag = "v9.9.9"',  # commit = "unknown" is a line of another upstream's too
        'cutlass = "unknown"',
        f'sdist-sha256 = "{NEW_HASH}"',
        '"2.8.3.post1" = "55d5103ed846da8b56e0797acf4bde07dee4b1c7e8907fcfc6699c203030c348"',
    ]
    assert after[
        after.index('"2.8.3.post1" = "55d5103ed846da8b56e0797acf4bde07dee4b1c7e8907fcfc6699c203030c348"') - 1
    ].startswith('"2.8.3.post2"')
    assert lint.check(repository / SERIES_FOLDER) == []
    changes.check(repository / "CHANGES.md", changes.render(loaded, repository))
    assert "\n## flash-attn 9.9.9\n" in (repository / "CHANGES.md").read_text()
    assert not (repository / "build/rebase").exists()
    kept = json.loads((repository / "build/reports/rebase-2.8.3.post1-to-9.9.9.json").read_text())
    assert kept["range_diff"].count("=") >= 3
    assert "unknown" in report.submodule


def test_the_moved_series_applies_exactly_to_the_new_release(repository: Path) -> None:
    from scripts.series import export, tree

    start(repository, MOVED)
    loaded = matrix.load(repository / "wheel_matrix.toml")
    applied = tree.apply(
        model.read(repository / SERIES_FOLDER),
        loaded.upstream,
        checkout_of(FILES | MOVED),
        repository / "build/source",
    )
    assert (applied.root / LIB).read_text().startswith("# new\n")
    assert export.export(applied.root, repository / SERIES_FOLDER) == export.Exported((), ())


def test_a_patch_that_moves_without_a_change_keeps_every_byte(repository: Path) -> None:
    before = snapshot(repository)
    report = start(repository, {"setup.py": "other\n"})
    assert report.written == report.removed == ()
    after = snapshot(repository)
    assert {n for n in before if before[n] != after[n]} == {"wheel_matrix.toml", "CHANGES.md"}


def test_a_release_that_was_known_leaves_its_place_to_the_old_one(repository: Path) -> None:
    start(repository, {"setup.py": "other\n"}, version="2.8.2")
    loaded = matrix.load(repository / "wheel_matrix.toml")
    assert list(loaded.releases) == [
        "2.7.4.post1",
        "2.8.0.post2",
        "2.8.1",
        "2.8.3.post1",
        "2.8.3",
        "2.8.3.post2",
    ]


def test_a_hostile_git_configuration_changes_no_byte_of_a_rebase(
    repository: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    other = tmp_path / "other"
    shutil.copytree(repository, other)
    start(repository, MOVED)
    request.getfixturevalue("hostile_git")
    start(other, MOVED)
    assert snapshot(other) == snapshot(repository)


def test_a_known_commit_goes_into_the_pin_and_the_submodule(repository: Path) -> None:
    report = start(repository, {"setup.py": "other\n"}, commit="a" * 40, cutlass="b" * 40)
    staged = user(repository, "ls-files", "--stage", "upstream")
    assert staged.split()[:2] == ["160000", "a" * 40]
    assert "staged" in report.submodule


def test_a_commit_that_is_no_release_is_named_as_one_and_gives_way_to_a_release(repository: Path) -> None:
    version = "9.9.9.dev0+gaaaaaaaa"
    commit: dict[str, Any] = {"version": version, "tag": None, "commit": "a" * 40, "sdist_sha256": "unknown"}
    start(repository, {"setup.py": "other\n"}, **commit)
    text = (repository / "wheel_matrix.toml").read_text()
    assert 'tag = "v' not in text
    assert matrix.load(repository / "wheel_matrix.toml").upstream.version == version
    told = (repository / "CHANGES.md").read_text()
    assert f"\n## flash-attn {version}\n" in told
    assert f", commit {'a' * 40}, which is no release." in told
    commit_state(repository)
    start(repository, {"setup.py": "release\n"})
    loaded = matrix.load(repository / "wheel_matrix.toml")
    assert loaded.upstream.tag == "v9.9.9"
    assert version not in loaded.releases, "there is no sdist of it"


def test_a_conflict_stops_with_patch_place_and_next_commands_and_changes_nothing(repository: Path) -> None:
    before = snapshot(repository)
    with pytest.raises(ActionNeeded) as caught:
        start(repository, UPSTREAM)
    text = str(caught.value)
    for part in (
        "patch 1 of 3, Change-the-tenth-value.patch: conflict on 9.9.9",
        f"{LIB}:11: conflict; 9.9.9 has 'value_10 = ten'",
        "--continue",
        "--skip --reason",
        "--abort",
        str(repository / "build/rebase/source"),
    ):
        assert part in text
    assert snapshot(repository) == before


def test_continue_takes_the_resolution(stopped: Path) -> None:
    waits(stopped, rf"{LIB}:11: a conflict of Change-the-tenth-value.* is not resolved")
    resolve(stopped)
    report = resume(stopped).proceed()
    assert [d.outcome for d in report.done] == ["resolved", "clean", "clean"]
    assert (
        "+value_10 = compute_ten(ten)"
        in (stopped / "patches/flash-attn/Change-the-tenth-value.patch").read_text()
    )


def continue_by_hand(source: Path) -> None:
    """Commit what is staged, as a user would at a conflict."""
    user(source, "-c", "core.editor=true", "cherry-pick", "--continue")


def test_continue_takes_a_commit_that_the_user_made(stopped: Path) -> None:
    resolve(stopped)
    source = stopped / "build/rebase/source"
    user(source, "add", "--all")
    continue_by_hand(source)
    assert [d.outcome for d in resume(stopped).proceed().done] == ["resolved", "clean", "clean"]


def test_a_resolution_that_leaves_nothing_asks_for_a_reason(stopped: Path) -> None:
    resolve(stopped, "value_10 = ten\n")
    waits(stopped, r"would leave nothing.*--skip")


def test_what_is_told_at_the_end_counts_the_patches_that_are_left(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = resume(stopped).skip("upstream has it")
    asked: list[Sequence[str]] = []

    def lines(changes: object, patches: Sequence[str], package: str | None) -> list[str]:
        asked.append(patches)
        return []

    monkeypatch.setattr(upstream_words, "lines", lines)
    rebase_command._tell(report, matrix.load(stopped / "wheel_matrix.toml"))
    assert asked == [tuple(p.name for p in model.read(stopped / SERIES_FOLDER).patches)]
    assert len(report.series) == len(report.done) - 1 == 2


def test_skip_records_the_reason(stopped: Path) -> None:
    with pytest.raises(UsageError, match="for a reason"):
        resume(stopped).skip(" ")
    report = resume(stopped).skip("upstream computes it now")
    assert [d.reason for d in report.done] == ["upstream computes it now", "", ""]
    listing = (stopped / "patches/flash-attn/series").read_text()
    assert "# not since 9.9.9: Change-the-tenth-value.patch: upstream computes it now" in listing
    assert [p.subject for p in model.read(stopped / SERIES_FOLDER).patches] == [
        "Add a header",
        "Change the last value",
    ]


def test_files_that_cannot_be_written_at_the_end_are_named_and_written_by_the_next_run(
    repository: Path,
) -> None:
    before, blocked = snapshot(repository), repository / "wheel_matrix.toml.part/file"
    blocked.parent.mkdir()
    blocked.touch()
    with pytest.raises(
        ActionNeeded, match=r"(?s)wheel_matrix\.toml.*some are, some are not.*--continue.*--abort"
    ):
        start(repository, MOVED)
    shutil.rmtree(blocked.parent)
    report = resume(repository).proceed()
    after = snapshot(repository)
    assert (
        set(report.written)
        == {
            name.removeprefix("patches/flash-attn/")
            for name in after
            if name.startswith("patches/flash-attn/") and before.get(name) != after[name]
        }
        != set()
    )


def test_a_landed_patch_stops_with_its_evidence_and_is_not_dropped_by_itself(repository: Path) -> None:
    with pytest.raises(
        ActionNeeded,
        match=r"Change-the-tenth-value.*: landed-identical on 9\.9\.9\.\n.*the whole patch reverse-applies",
    ) as caught:
        start(repository, EDIT[1])
    assert "if upstream has all of it: nox -s rebase -- --skip" in str(caught.value)
    assert "--continue" not in str(caught.value), "there is nothing to resolve"
    assert len(resume(repository).skip("in 9.9.9").done) == 3


def test_abort_leaves_everything_as_it_was(repository: Path) -> None:
    before = snapshot(repository)
    with pytest.raises(ActionNeeded):
        start(repository, UPSTREAM)
    assert "dropped" in resume(repository).abort()
    assert snapshot(repository) == before
    assert not (repository / "build/rebase").exists()
    with pytest.raises(UsageError, match="no rebase is under way"):
        resume(repository).abort()


def test_a_second_rebase_is_refused_while_one_is_under_way(stopped: Path) -> None:
    with pytest.raises(UsageError, match="under way"):
        start(stopped, UPSTREAM)
    assert resume(stopped).folder.load().stopped


def test_the_same_release_is_refused(repository: Path) -> None:
    known = matrix.load(repository / "wheel_matrix.toml").upstream
    with pytest.raises(UsageError, match=r"stands on 2\.8\.3\.post1 already"):
        Rebase(repository, repository / "build/rebase").start(
            matrix.load(repository / "wheel_matrix.toml"),
            model.read(repository / SERIES_FOLDER),
            checkout_of(FILES),
            Release(known, checkout_of(FILES), ""),
        )


def test_patches_that_changed_meanwhile_are_not_overwritten(stopped: Path) -> None:
    change_a_patch(stopped)
    before = snapshot(stopped)
    resolve(stopped)
    waits(stopped, "changed since the rebase began")
    assert snapshot(stopped) == before


def test_what_is_not_committed_is_not_rebased_over(repository: Path) -> None:
    change_a_patch(repository)
    with pytest.raises(SeriesError, match=r"not committed:\n M patches/flash-attn/Add-a-header\.patch"):
        start(repository, {"setup.py": "other\n"})
    assert not (repository / "build/rebase").exists()


def test_conflict_markers_that_were_added_are_no_resolution(stopped: Path) -> None:
    source = stopped / "build/rebase/source"
    user(source, "add", "--all")
    waits(stopped, rf"{LIB}:11: a conflict of Change-the-tenth-value.* is not resolved")
    continue_by_hand(source)
    waits(stopped, "is not resolved")


def test_files_beside_a_resolution_do_not_get_into_the_patch(stopped: Path) -> None:
    resolve(stopped)
    stray = stopped / "build/rebase/source" / f"{LIB}.orig"
    stray.write_text("x\n")
    waits(stopped, rf"does not know: {LIB}\.orig")
    stray.unlink()
    assert "orig" not in "".join(resume(stopped).proceed().written)


def test_an_empty_commit_is_no_resolution(stopped: Path) -> None:
    source = stopped / "build/rebase/source"
    user(source, "cherry-pick", "--abort")
    user(source, "commit", "--quiet", "--allow-empty", "-m", "nothing")
    waits(stopped, r"changes nothing.*--skip")


def test_an_operation_of_git_s_that_is_not_finished_is_no_resolution(stopped: Path) -> None:
    resolve(stopped)
    source = stopped / "build/rebase/source"
    user(source, "add", "--update")
    continue_by_hand(source)
    user(source, "rebase", "-i", "HEAD~1", GIT_SEQUENCE_EDITOR="echo break >>")
    waits(stopped, r"in the middle of a rebase; finish it there, then .*--continue")
    user(source, "rebase", "--continue")
    assert resume(stopped).proceed().done[0].outcome == "resolved"


def test_a_resolution_keeps_every_line_of_the_message(repository: Path) -> None:
    """Git drops lines that begin with # where it thinks that a person edited a message."""
    path = repository / SERIES_FOLDER / f"{EDIT[0].replace(' ', '-')}.patch"
    path.write_text(path.read_text().replace("Because", "#include is\n#\nBecause"))
    commit_state(repository)
    with pytest.raises(ActionNeeded):
        start(repository, UPSTREAM)
    resolve(repository)
    resume(repository).proceed()
    assert "#include is\n#\nBecause" in path.read_text()


def test_patches_that_vanish_from_the_tree_are_missed(stopped: Path) -> None:
    resolve(stopped, "value_10 = ten + 0\n")
    waits(stopped, "not yet good")
    user(stopped / "build/rebase/source", "reset", "--quiet", "--hard", "HEAD~2")
    waits(stopped, "holds 1 patches on the new base, and 3 were moved")


def test_a_message_without_trailers_is_told_with_the_way_on(stopped: Path) -> None:
    resolve(stopped)
    source = stopped / "build/rebase/source"
    user(source, "add", "--update")
    user(source, "commit", "--quiet", "-m", "Resolve")
    waits(stopped, r"(?s)no trailer Upstream-Status.*--continue.*--abort")


def test_work_on_a_conflict_outlives_a_kill_before_the_conflict_was_recorded(stopped: Path) -> None:
    path = stopped / "build/rebase/state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stopped": False}))
    resolve(stopped)
    assert [d.outcome for d in resume(stopped).proceed().done] == ["resolved", "clean", "clean"]


def told_by(repository: Path) -> str:
    return "\n".join(rebase_status.standing(resume(repository).folder).lines)


def test_a_rebase_says_what_it_had_begun_to_write(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_and_kill(repository, repository / "wheel_matrix.toml")
    being_written = "patches/flash-attn, wheel_matrix.toml, CHANGES.md were being written when a run ended"
    assert f"all 3 patches have moved; {being_written}" in told_by(repository)
    with monkeypatch.context() as during:
        during.setattr(export, "write_folder", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resume(repository).abort()
    assert "were being taken back when a run ended" in told_by(repository)
    state = resume(repository).folder.state_path
    text = state.read_text()
    state.write_text("{")
    with pytest.raises(
        SeriesError, match=r"is damaged: .*--abort .* taken back from .*rebase-aborted/before"
    ):
        resume(repository).proceed()
    state.write_text(text)
    resume(repository).proceed()


def test_a_checkout_that_was_read_only_is_written_or_left_once_it_is_not(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of its folders can be written to; where nothing was written, nothing is put back."""
    before, write_folder, path = snapshot(repository), export.write_folder, repository / SERIES_FOLDER

    def read_only(folder: Path, *rest: Any) -> export.Exported:
        if folder == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return write_folder(folder, *rest)

    path.chmod(0o555)
    with monkeypatch.context() as during:
        during.setattr(export, "write_folder", read_only)
        with pytest.raises(ActionNeeded, match=r"flash-attn: Permission denied, while .* some are not"):
            start(repository, MOVED)
    kept = repository / "build/rebase"
    assert all(p.stat().st_mode & 0o200 for name in ("before", "after") for p in (kept / name).rglob("*"))
    aborted = shutil.copytree(repository, repository.with_name("aborted"), symlinks=True)
    with monkeypatch.context() as during:
        during.setattr(files, "write_bytes", allowed(files.write_bytes, aborted / "build"))
        assert "as they were" in resume(aborted).abort()
    assert snapshot(aborted) == before
    path.chmod(0o755)
    resume(repository).proceed()
    assert snapshot(repository) != before


def allowed(write: Callable[[Path, bytes], None], folder: Path) -> Callable[[Path, bytes], None]:
    """The same below a folder alone."""

    def checked(path: Path, content: bytes) -> None:
        assert path.is_relative_to(folder)
        write(path, content)

    return checked


def test_work_done_after_a_kill_while_it_wrote_is_not_overwritten(repository: Path) -> None:
    assert run_and_kill(repository, repository / "wheel_matrix.toml")
    change_a_patch(repository)
    after = snapshot(repository)
    waits(repository, "changed since the rebase began")
    assert "left alone" in resume(repository).abort()
    assert snapshot(repository) == after
    assert not resume(repository).folder.path.exists()


def test_an_edit_between_two_runs_that_finish_is_neither_taken_nor_lost(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(affected_kernels, "kernels", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(repository, MOVED)
    path = repository / "wheel_matrix.toml"
    path.write_text(path.read_text() + "# my own note\n")
    waits(repository, r"wheel_matrix\.toml changed since the rebase began to write")
    assert "left alone" in resume(repository).abort()
    assert path.read_text().endswith("# my own note\n")


def test_a_patch_may_be_amended_between_two_runs_that_finish(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as during:
        during.setattr(affected_kernels, "kernels", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(repository, MOVED)
    source = repository / "build/rebase/source"
    message = user(source, "log", "-1", "--format=%B")
    other = message.replace(message.splitlines()[0], "Change it otherwise")
    user(source, "commit", "--quiet", "--amend", "-m", other)
    resume(repository).proceed()
    assert model.read(repository / SERIES_FOLDER).patches[-1].subject == "Change it otherwise"
    assert "Change it otherwise" in (repository / "CHANGES.md").read_text()


def test_an_abort_that_was_interrupted_can_be_repeated(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write = snapshot(repository), files.write_bytes

    def interrupted_at_series(path: Path, content: bytes) -> None:
        if path.name == "series":
            raise KeyboardInterrupt
        write(path, content)

    with monkeypatch.context() as during:
        during.setattr(affected_kernels, "kernels", interrupted)
        with pytest.raises(ActionNeeded):
            start(repository, UPSTREAM)
        with pytest.raises(KeyboardInterrupt):
            resume(repository).skip("not wanted")
        during.setattr(files, "write_bytes", interrupted_at_series)
        with pytest.raises(KeyboardInterrupt):
            resume(repository).abort()
    assert "as they were" in resume(repository).abort()
    assert snapshot(repository) == before


def staged_submodule(root: Path) -> list[str]:
    return user(root, "ls-files", "--stage", "upstream").split()[1:2]


@pytest.mark.parametrize("submodule", ["a" * 40, None])
@pytest.mark.parametrize("edited", ["wheel_matrix.toml", "CHANGES.md", "patches/flash-attn/series", None])
def test_abort_takes_back_what_a_rebase_wrote_and_nothing_that_a_person_did(
    repository: Path, monkeypatch: pytest.MonkeyPatch, submodule: str | None, edited: str | None
) -> None:
    if submodule:
        user(repository, "update-index", "--add", "--cacheinfo", f"160000,{submodule},upstream")
        user(repository, "commit", "--quiet", "-m", "submodule")
    before = snapshot(repository)
    with monkeypatch.context() as during:
        during.setattr(affected_kernels, "kernels", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(repository, MOVED, commit="b" * 40)
    assert staged_submodule(repository) == ["b" * 40]
    if edited:
        path = repository / edited
        path.write_text(path.read_text() + "# my own note\n")
        after = snapshot(repository)
        assert "left alone" in resume(repository).abort()
        assert snapshot(repository) == after
        return
    assert "as they were" in resume(repository).abort()
    assert snapshot(repository) == before
    assert staged_submodule(repository) == ([submodule] if submodule else [])


def test_a_rebase_that_was_killed_while_it_wrote_and_lost_its_state_can_be_dropped(repository: Path) -> None:
    assert run_and_kill(repository, repository / "wheel_matrix.toml")
    after = snapshot(repository)
    (repository / "build/rebase/state.json").write_text("{")
    assert "left alone" in resume(repository).abort()
    assert snapshot(repository) == after


def test_a_patch_that_lost_what_it_guards_is_refused_at_the_end_and_can_be_amended(repository: Path) -> None:
    """A resolution that keeps the patch's other line drops the hook, and nothing else would tell."""
    before = snapshot(repository)
    with pytest.raises(ActionNeeded):
        start(repository, UPSTREAM)
    resolve(repository, "value_10 = ten + 0\n")
    waits(
        repository, r"(?s)not yet good:.*Change-the-tenth-value.*fails on the tree with the patch.*--continue"
    )
    assert snapshot(repository) == before
    source = repository / "build/rebase/source"
    text = (source / LIB).read_text()
    (source / LIB).write_text(text.replace("ten + 0", "compute_ten(ten)"))
    waits(repository, "is not finished")
    user(source, "commit", "--quiet", "--all", "--fixup", "HEAD~2")
    base = json.loads((repository / "build/rebase/state.json").read_text())["new_base"]
    user(source, "rebase", "--quiet", "--interactive", "--autosquash", base, GIT_SEQUENCE_EDITOR="true")
    assert resume(repository).proceed().new == "9.9.9"


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 0}', '{"format": 1}'])
def test_a_damaged_state_is_an_error_that_says_how_to_get_out(stopped: Path, damage: str) -> None:
    (stopped / "build/rebase/state.json").write_text(damage)
    with pytest.raises(SeriesError, match=r"state\.json is .*--abort"):
        resume(stopped).proceed()
    resume(stopped).abort()


def test_a_state_whose_repository_lost_the_series_is_an_error(stopped: Path) -> None:
    state = json.loads((stopped / "build/rebase/state.json").read_text())
    (stopped / "build/rebase/state.json").write_text(json.dumps(state | {"tip": "0" * 40}))
    with pytest.raises(SeriesError, match="has lost the old series"):
        resume(stopped).proceed()


# --- kill -9 ---


def rebase_and_die(repository: Path, end: int | Path) -> None:
    """Rebase, and end without a word before the step of this number, or before this file is written."""
    steps = itertools.count(1)

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if end in (next(steps), arguments[0]):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return wrapped

    for module, name in ((move, "pick"), (files, "write_bytes"), (export, "write_folder"), (pin, "write")):
        setattr(module, name, mortal(getattr(module, name)))
    start(repository, MOVED)


def run_and_kill(repository: Path, end: int | Path) -> bool:
    """Run the rebase in a process of its own that is killed; whether it got there."""
    process = forked.context().Process(target=rebase_and_die, args=(repository, end))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def test_a_rebase_that_is_killed_anywhere_goes_on_and_ends_the_same_or_is_aborted(
    repository_of: Callable[..., Path], tmp_path: Path
) -> None:
    """At each pick, at what the end writes aside and in its place, and at each record."""
    edits = (EDIT, ADD)
    repository = repository_of(*edits)
    before, written, kills = snapshot(repository), 0, 0
    for place in itertools.count(1):
        killed = shutil.copytree(repository, tmp_path / f"killed-{place}", symlinks=True)
        if not run_and_kill(killed, place):
            break
        kills += 1
        written += snapshot(killed) != before
        if resume(killed).under_way:
            aborted = shutil.copytree(killed, tmp_path / f"aborted-{place}", symlinks=True)
            assert "as they were" in resume(aborted).abort()
            assert snapshot(aborted) == before
            assert not (aborted / "build/rebase").exists()
            resume(killed).proceed()
        else:
            assert snapshot(killed) == before
            start(killed, MOVED)
        assert_moved(killed, edits)
    assert_moved(killed, edits)
    assert kills > len(edits)
    assert written > 1


def assert_moved(repository: Path, edits: tuple[Edit, ...]) -> None:
    loaded = matrix.load(repository / "wheel_matrix.toml")
    assert loaded.upstream.version == "9.9.9"
    moved = model.read(repository / SERIES_FOLDER)
    assert [p.subject for p in moved.patches] == [edit[0] for edit in edits]
    assert "value_7 = 7" in moved.patches[0].content.decode()
    assert lint.check(repository / SERIES_FOLDER) == []
    changes.check(repository / "CHANGES.md", changes.render(loaded, repository))
    assert not [p for p in (repository / "patches").iterdir() if p.name.startswith(".")]


def test_a_kill_while_a_patch_is_picked_leaves_no_half_pick(stopped: Path) -> None:
    resolve(stopped)
    rebase = resume(stopped)
    state = rebase._take_resolution(rebase.folder.load())
    # As after a kill in the middle of the next pick: a lock, a half-written file, a pick begun.
    source = stopped / "build/rebase/source"
    subprocess.run(
        ["git", "-C", str(source), "cherry-pick", "--no-commit", state.tip], check=False, capture_output=True
    )
    (source / ".git/index.lock").touch()
    write_files(source, {"half": "x"})
    assert [d.outcome for d in resume(stopped).proceed().done] == ["resolved", "clean", "clean"]
    assert "half" not in "".join(p.content.decode() for p in model.read(stopped / SERIES_FOLDER).patches)


def test_going_on_too_early_leaves_the_conflict_as_git_shows_it(stopped: Path) -> None:
    source = Repository(stopped / "build/rebase/source", SeriesError)
    unmerged = source.run("ls-files", "--unmerged", writes=False)
    assert unmerged
    waits(stopped, "is not resolved")
    assert source.run("ls-files", "--unmerged", writes=False) == unmerged
    resolve(stopped)
    assert [d.outcome for d in resume(stopped).proceed().done] == ["resolved", "clean", "clean"]


def test_a_dropped_rebase_keeps_what_was_resolved(stopped: Path) -> None:
    source = stopped / "build/rebase/source"
    resolve(stopped)
    user(source, "commit", "--quiet", "--all", "--no-edit")
    mine = Repository(source, SeriesError).resolve("HEAD")
    assert "build/rebase-aborted/source" in resume(stopped).abort()
    assert Repository(stopped / "build/rebase-aborted/source", SeriesError).resolve("HEAD") == mine
    with pytest.raises(ActionNeeded):  # the next one begins anew
        start(stopped, UPSTREAM)


def test_a_work_tree_whose_pick_was_undone_tells_how_to_begin_it_again(stopped: Path) -> None:
    source = Repository(stopped / "build/rebase/source", SeriesError)
    picked = source.resolve("CHERRY_PICK_HEAD")
    source.run("cherry-pick", "--abort")
    waits(stopped, f"git cherry-pick {picked[:12]} begins it again")


def test_patches_that_changed_meanwhile_are_put_back_by_the_command_that_is_told(stopped: Path) -> None:
    change_a_patch(stopped)
    commit_state(stopped)
    resolve(stopped)
    with pytest.raises(ActionNeeded, match="changed since the rebase began") as caught:
        resume(stopped).proceed()
    command = re.search(r"\((git restore [^)]*)\)", str(caught.value))
    assert command is not None
    subprocess.run(command[1].split(), cwd=stopped, check=True)
    assert [d.outcome for d in resume(stopped).proceed().done] == ["resolved", "clean", "clean"]

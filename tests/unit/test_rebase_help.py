"""What makes a rebase's stops easier: remembered resolutions, where it stands, what is behind a conflict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.base import files, layout
from scripts.base.errors import ActionNeeded, UsageError
from scripts.series.rebase import status as rebase_status
from tests.unit import test_rebase as rebasing
from tests.unit.conftest import Command, Kept, Make, commit, user, write_files
from tests.unit.test_rebase import (
    FILES,
    HEADER,
    LIB,
    SERIES_FOLDER,
    UPSTREAM,
    resolve,
    resume,
    start,
    waits,
    with_line,
)

repository_of, repository, stopped = rebasing.repository_of, rebasing.repository, rebasing.stopped

# EDIT and LAST conflict with it: a rebase can be dropped after one resolution and before the other.
TWICE = with_line(29, "value_29 = last\n", FILES | UPSTREAM)
MINE = "value_10 = compute_ten(ten)\n"


def resolve_first_and_drop(root: Path, text: str = MINE) -> None:
    with pytest.raises(ActionNeeded):
        start(root, TWICE)
    resolve(root, text)
    waits(root, "Change-the-last-value")
    resume(root).abort()


@pytest.fixture
def dropped(repository: Path, kept: Kept) -> Path:
    """A repository in which a rebase was dropped after its first resolution."""
    return rebasing.after(kept, "a rebase that was dropped", repository, resolve_first_and_drop)


def conflict(root: Path) -> str:
    return (root / "build/rebase/source" / LIB).read_text()


def test_a_resolution_of_a_dropped_rebase_is_shown_and_taken_when_asked_for(dropped: Path) -> None:
    with pytest.raises(ActionNeeded) as caught:
        start(dropped, TWICE)
    told = str(caught.value)
    for line in ("-<<<<<<< HEAD", "-value_10 = ten", "+" + MINE.rstrip(), "--use-remembered"):
        assert line in told
    assert "<<<<<<< " in conflict(dropped), "nothing is taken silently"
    with pytest.raises(ActionNeeded, match="Change-the-last-value") as caught:
        resume(dropped).use_remembered()
    assert "--use-remembered" not in str(caught.value), "that one was never resolved"
    resolve(dropped, "value_29 = compute_last(last)\n")
    assert [d.outcome for d in resume(dropped).proceed().done] == ["resolved", "clean", "resolved"]
    assert f"+{MINE}" in (dropped / "patches/flash-attn/Change-the-tenth-value.patch").read_text()


def test_the_last_of_several_resolutions_is_remembered(dropped: Path) -> None:
    resolve_first_and_drop(dropped, "value_10 = compute_ten(ten, 2)\n")
    with pytest.raises(ActionNeeded, match=r"\+value_10 = compute_ten\(ten, 2\)\n(?!.*compute_ten\(ten\)\n)"):
        start(dropped, TWICE)


def test_a_commit_that_the_user_made_is_remembered_too(repository: Path) -> None:
    with pytest.raises(ActionNeeded):
        start(repository, TWICE)
    resolve(repository)
    user(repository / "build/rebase/source", "add", "--all")
    rebasing.continue_by_hand(repository / "build/rebase/source")
    with pytest.raises(ActionNeeded):
        resume(repository).proceed()
    resume(repository).abort()
    with pytest.raises(ActionNeeded, match="--use-remembered"):
        start(repository, TWICE)


def test_a_remembered_resolution_does_not_overwrite_an_edit(dropped: Path) -> None:
    with pytest.raises(ActionNeeded):
        start(dropped, TWICE)
    path = dropped / "build/rebase/source" / LIB
    path.write_text(path.read_text() + "mine = 1\n")
    before = path.read_bytes()
    with pytest.raises(ActionNeeded, match=r"lib\.py was edited since the conflict"):
        resume(dropped).use_remembered()
    assert path.read_bytes() == before


def test_where_nothing_is_remembered_nothing_is_taken(repository: Path) -> None:
    with pytest.raises(UsageError, match="no rebase is under way"):
        resume(repository).use_remembered()
    with pytest.raises(ActionNeeded) as caught:
        start(repository, TWICE)
    assert "--use-remembered" not in str(caught.value)
    with pytest.raises(ActionNeeded, match="no resolution of Change-the-tenth-value"):
        resume(repository).use_remembered()


def test_an_interruption_while_a_resolution_is_remembered_leaves_what_was_and_loses_no_work(
    dropped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = dropped / "build/resolutions"
    before = {p.relative_to(cache): p.read_bytes() for p in cache.rglob("*") if p.is_file()}
    assert before

    with pytest.raises(ActionNeeded):
        start(dropped, TWICE)
    resolve(dropped, "value_10 = compute_ten(ten, 2)\n")
    with monkeypatch.context() as during:
        during.setattr(files, "exchange", rebasing.interrupted)
        with pytest.raises(KeyboardInterrupt):
            resume(dropped).proceed()
    assert {p.relative_to(cache): p.read_bytes() for p in cache.rglob("*") if p.is_file()} == before
    waits(dropped, "Change-the-last-value")
    assert before != {p.relative_to(cache): p.read_bytes() for p in cache.rglob("*") if p.is_file()}


def test_a_rebase_says_where_it_stands(stopped: Path) -> None:
    for recorded in (True, False):  # and after a kill between the conflict and its record
        path = stopped / "build/rebase/state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"stopped": recorded}))
        standing = rebase_status.standing(resume(stopped).folder)
        told = "\n".join(standing.lines)
        assert "patch (1/3) Change-the-tenth-value.patch waits for you" in told
        assert f"{LIB}:11: conflict" in told
        assert standing.remaining == ("Add-a-header.patch", "Change-the-last-value.patch")
        assert all(word in told for word in ("--continue", "--skip --reason", "--abort"))
    resolve(stopped, "value_10 = ten + 0\n")
    assert rebase_status.standing(resume(stopped).folder).conflicts == (f"{LIB} (no marker is left)",)
    waits(stopped, "not yet good")
    told = "\n".join(rebase_status.standing(resume(stopped).folder).lines)
    assert "all 3 patches have moved; nothing is written yet" in told
    assert "--skip" not in told


def test_a_rebase_that_waits_at_a_landed_patch_says_so(repository: Path) -> None:
    with pytest.raises(ActionNeeded, match="landed-identical"):
        start(repository, rebasing.EDIT[1])
    told = "\n".join(rebase_status.standing(resume(repository).folder).lines)
    assert "landed-identical: the whole patch reverse-applies to 9.9.9" in told
    assert "--skip --reason" in told
    assert "--continue" not in told, "there is nothing to resolve"


def test_the_command_alone_says_where_it_stands(
    repository: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "BUILD", repository / "build")
    outside = command("rebase")
    assert outside.status == 0
    assert "No rebase is under way; the series stands on" in outside.out
    assert "nox -s rebase -- VERSION begins" in outside.out
    assert json.loads(command("rebase", "--json").out) == {"under_way": False}
    with pytest.raises(ActionNeeded):
        start(repository, UPSTREAM)
    assert "patch (1/3) Change-the-tenth-value.patch waits for you" in command("rebase").out
    answer = json.loads(command("rebase", "--json").out)
    assert (answer["under_way"], answer["done"], answer["total"]) == (True, 0, 3)
    assert answer["conflicts"] == [f"{LIB}:11"]


def test_skip_warns_of_later_patches_that_need_it(
    make_series: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], repository: Path
) -> None:
    """One needs the skipped patch itself, one needs that one, and one needs neither."""
    for path in (repository / SERIES_FOLDER).iterdir():
        path.unlink()
    first = with_line(10, "value_10 = compute_ten()\n")
    second = with_line(10, "value_10 = compute_ten(2)\n")
    third = with_line(10, "value_10 = compute_ten(2)\nvalue_10b = 3\n")
    guards = [
        f"symbol compute_ten in {LIB}",
        f"signature compute_ten(2) in {LIB}",
        f"symbol value_10b in {LIB}",
    ]
    make_series(
        ("Change the tenth", first, guards[0]),
        ("Add a header", {HEADER: "inline int fork();\n"}, f"symbol fork in {HEADER}"),
        ("Change it again", second, guards[1]),
        ("Add to it", third, guards[2]),
        base=FILES,
        folder=repository,
        to=SERIES_FOLDER,
    )
    rebasing.commit_state(repository)
    with pytest.raises(ActionNeeded) as caught:
        start(repository, UPSTREAM)
    needing = "Change-it-again.patch, Add-to-it.patch"
    assert f"later patches that need it: {needing}" in str(caught.value)
    capsys.readouterr()
    with pytest.raises(ActionNeeded, match="Change-it-again"):
        resume(repository).skip("not wanted")
    assert f"later patches need the one that is left out: {needing}" in capsys.readouterr().err


def test_upstream_s_history_is_told_of_the_conflicting_lines_alone(repository: Path) -> None:
    """Six commits of upstream's change the file, two of them the lines that conflict."""
    upstream = repository / "upstream"
    upstream.mkdir()
    user(upstream, "init", "--quiet")
    steps: list[tuple[str, str]] = [
        ("Begin", ""),
        ("Rename the tenth", "value_10 = 10\n=value_10 = old_ten\n"),
        ("Change the second", "value_2 = 2\n=value_2 = two\n"),
        ("Add before all", "value_0 = 0\n=# new\nvalue_0 = 0\n"),
        ("Change the tenth once more", "value_10 = old_ten\n=value_10 = ten\n"),
        ("Change the twentieth", "value_20 = 20\n=value_20 = twenty\n"),
        ("Change the first", "value_1 = 1\n=value_1 = one\n"),
    ]
    text, commits = FILES[LIB], []
    for subject, change in steps:
        before, _, after = change.partition("\n=")
        text = text.replace(before + "\n", after) if change else text
        write_files(upstream, {LIB: text})
        commit(upstream, "-m", subject)
        commits.append(user(upstream, "rev-parse", "HEAD").strip())
    path = repository / "wheel_matrix.toml"
    pinned = next(line for line in path.read_text().splitlines() if line.startswith("commit = "))
    path.write_text(path.read_text().replace(pinned, f'commit = "{commits[0]}"', 1))
    (repository / ".gitignore").write_text("/build/\n/flag-*\n/upstream/\n")
    rebasing.commit_state(repository)
    with pytest.raises(ActionNeeded) as caught:
        start(repository, {LIB: text}, commit=commits[-1])
    told = str(caught.value).partition("upstream's commits on these lines:\n")[2].splitlines()
    subjects = [line.strip().split(" ", 1)[1] for line in told if line.startswith("    ")]
    assert subjects == ["Change the tenth once more", "Rename the tenth"]

"""Which of CI's long cases a run takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import turns


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def commits(tmp_path: Path) -> Path:
    """A repository of five."""
    git(tmp_path, "init", "--quiet", "whole")
    for number in range(5):
        git(tmp_path / "whole", "commit", "--quiet", "--allow-empty", "-m", str(number))
    return tmp_path / "whole"


def test_commits_take_turns(commits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ROOT", commits)
    assert (turns.turn(3), turns.turn(4)) == (2, 1)


def test_a_shallow_clone_has_none(commits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "clone", "--quiet", "--depth", "1", commits.as_uri(), "shallow")
    monkeypatch.setattr(turns, "ROOT", tmp_path / "shallow")
    with pytest.raises(RuntimeError, match="--every-turn"):
        turns.turn(3)


def collected(case: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a file of these cases as one of tests/integration, in a repository of five commits."""
    conftest = (turns.ROOT / "tests/integration/conftest.py").read_text(encoding="utf-8")
    conftest += (
        f"\nfrom tests.integration import turns as those\nthose.ROOT = Path({str(folder / 'whole')!r})\n"
    )
    (folder / "conftest.py").write_text(conftest, encoding="utf-8")
    (folder / "test_it.py").write_text(f"import pytest\nfrom tests.integration.turns import parts\n{case}")
    command = ["-m", "pytest", str(folder), "-c", os.devnull, f"--rootdir={folder}", *options]
    return subprocess.run(
        [sys.executable, *command], cwd=turns.ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("marker", ["in_turn", "in_turn()", f"in_turn(0, {turns.TURNS})"])
def test_a_turn_that_never_comes_is_an_error(marker: str, commits: Path, tmp_path: Path) -> None:
    done = collected(f"@pytest.mark.{marker}\ndef test_it(): pass\n", tmp_path, "--every-turn")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"name turns from 0 to {turns.TURNS - 1}" in done.stderr


@pytest.mark.parametrize("lanes", [(), ("-p", "xdist", "--numprocesses=2", "--dist=loadfile")])
def test_a_run_takes_one_part_and_tells_what_it_leaves_to_other_turns(
    commits: Path, tmp_path: Path, lanes: tuple[str, ...]
) -> None:
    every = f"@parts([*range({turns.TURNS})])\ndef test_it(part): pass\n"
    done = collected(every, tmp_path, "--all-cases", "-rA", *lanes)
    own, others = 5, turns.TURNS - 1  # after five commits
    assert f"test_it[{own + 1}/{turns.TURNS}]" in done.stdout
    assert "1 passed" in done.stdout
    assert f"left to other turns: {others} cases" in done.stdout
    for turn in {*range(turns.TURNS)} - {own}:
        assert f"turn {turn}: test_it.py::test_it[{turn + 1}/{turns.TURNS}]" in done.stdout
    whole = collected(every, tmp_path, "--every-turn")
    assert f"{turns.TURNS} passed" in whole.stdout
    assert "left to other turns" not in whole.stdout
    alone = collected(every, tmp_path)
    assert f"left to other turns: {turns.TURNS} cases; --every-turn runs them" in alone.stdout


def test_files_that_are_apart_run_beside_the_others_which_one_process_runs(
    commits: Path, tmp_path: Path
) -> None:
    apart = min(turns.APART)
    folder = turns.ROOT / "tests/integration"
    assert {f"{name}.py" for name in turns.APART} <= {path.name for path in folder.iterdir()}
    told = "pathlib.Path(__file__).with_suffix('.ran').write_text(os.environ['PYTEST_XDIST_WORKER'])"
    for name in ("test_one", "test_other", apart):
        (tmp_path / f"{name}.py").write_text(f"import os, pathlib\ndef test_it(): {told}\n")
    done = collected("", tmp_path, "-p", "xdist", "--numprocesses=2", "--dist=loadfile")
    assert done.returncode == 0, done.stdout
    ran = {path.stem: path.read_text() for path in tmp_path.glob("*.ran")}
    assert ran["test_one"] == ran["test_other"] != ran[apart]


def test_what_only_a_release_runs_takes_no_turn(commits: Path, tmp_path: Path) -> None:
    case = "@pytest.mark.release\ndef test_it(): pass\n"
    assert "1 passed" in collected(case, tmp_path, "--every-turn").stdout
    done = collected(case, tmp_path, "--all-cases")
    assert "left to a release: test_it.py::test_it" in done.stdout


@pytest.mark.parametrize(
    ("options", "clients"),
    [((), set()), (("--every-turn",), {"[sglang]", "[vllm]"})],
)
def test_every_turn_takes_what_no_turn_leaves_out(options: tuple[str, ...], clients: set[str]) -> None:
    """Collected by pytest itself, as the option's hooks are its."""
    command = ["-m", "pytest", "tests/integration/test_emulated.py", "--collect-only", "--quiet", *options]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=turns.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    chosen = [line for line in done.stdout.splitlines() if line.startswith("tests/integration/")]
    assert {name for name in ("[sglang]", "[vllm]") if any(name in line for line in chosen)} == clients

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


def test_the_emulator_s_suite_has_as_many_turns() -> None:
    text = (turns.ROOT / "tests/emulator/conftest.py").read_text(encoding="utf-8")
    assert f"\nTURNS = {turns.TURNS} " in text


@pytest.mark.parametrize("marker", ["in_turn", "in_turn()", f"in_turn(0, {turns.TURNS})"])
def test_a_turn_that_never_comes_is_an_error(marker: str, tmp_path: Path) -> None:
    conftest = (turns.ROOT / "tests/integration/conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
    case = f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass\n"
    (tmp_path / "test_it.py").write_text(case, encoding="utf-8")
    command = ["-m", "pytest", str(tmp_path), "-c", os.devnull, f"--rootdir={tmp_path}", "--every-turn"]
    done = subprocess.run(
        [sys.executable, *command], cwd=turns.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"name turns from 0 to {turns.TURNS - 1}" in done.stderr


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
    assert {name for name in ("[sglang]", "[vllm]") if name in done.stdout} == clients

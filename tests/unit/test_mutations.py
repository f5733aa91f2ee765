"""The table of mutations is whole, and a change that no test notices is told; the checkout stays as it was."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from scripts.base.errors import UsageError
from scripts.base.git import Repository
from tests.mutations import copies, run, table
from tests.mutations.table import Mutation
from tests.unit.conftest import ROOT, write_files
from tests.unit.waiting import PATIENCE, until

MUTATIONS = table.read()
SUBJECT = "def add(a: int, b: int) -> int:\n    return a + b\n"
FAKE = {
    ".gitignore": "/build/\n__pycache__/\n",
    "scripts/__init__.py": "",
    "scripts/adds.py": SUBJECT,
    "tests/test_adds.py": "from scripts.adds import add\n\ndef test_two_and_two():\n    assert add(2, 2) == 4\n",
    "tests/test_slow.py": "import os, pathlib, time\n\ndef test_slow():\n"
    "    pathlib.Path('../begun').write_text(str(os.getpid())); time.sleep(60)\n",
}
TABLE = """
[{name}]
keeps = "two numbers are added"
kind = "program"
ring = "unit"
file = "scripts/adds.py"
old = "a + b"
new = "{new}"
tests = ["tests/{test}.py"]
"""


def test_there_are_forty() -> None:
    """Names are unique, for a table of TOML has each once."""
    assert Counter(m.kind for m in MUTATIONS.values()) == {"program": 22, "python": 6, "kernel": 12}
    assert {m.ring for m in MUTATIONS.values()} == set(run.RINGS)
    assert all(m.old != m.new and m.tests for m in MUTATIONS.values())


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_old_text_of_a_file_is_there_once(name: str) -> None:
    mutation = MUTATIONS[name]
    assert (ROOT / mutation.file).read_text("utf-8").count(mutation.old) == 1
    for test in mutation.tests if mutation.ring == "unit" else ():
        path, _, case = test.partition("::")
        assert f"def {case}" in (ROOT / path).read_text("utf-8")
    if mutation.file.startswith("patches/"):  # else git could not read the diff
        assert mutation.old.count("\n") == mutation.new.count("\n")


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A repository with a package ``scripts`` of its own; what it adds and a test are not committed."""
    root = tmp_path / "fake"
    write_files(root, FAKE | {"scripts/adds.py": "raise NotImplementedError\n", "gone.txt": "gone\n"})
    repository = Repository.create(root, UsageError)
    repository.run("add", "--all")
    repository.run("rm", "--quiet", "--cached", "tests/test_adds.py")
    repository.run("commit", "--quiet", "-m", "a commit")
    (root / "scripts/adds.py").write_text(SUBJECT)
    (root / "gone.txt").unlink()
    return root


def held(root: Path) -> dict[str, bytes]:
    """Every file of a work tree but what is built."""
    paths = [
        p for p in root.rglob("*") if p.is_file() and not {".git", "build"} & set(p.relative_to(root).parts)
    ]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def mutate(root: Path, *mutations: tuple[str, str, str]) -> int:
    """Make mutations, each a name, the new text and its test; the exit status."""
    path = root.parent / "mutations.toml"
    path.write_text("".join(TABLE.format(name=name, new=new, test=test) for name, new, test in mutations))
    return run.main([], root, path)


def test_a_mutation_is_noticed_in_a_copy_or_survives(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkout's own modules are not what is tested, though the environment has them installed."""
    before = held(fake)
    assert mutate(fake, ("noticed", "a - b", "test_adds")) == 0
    assert "caught" in capsys.readouterr().out
    assert mutate(fake, ("noticed", "a - b", "test_adds"), ("same", "a * b", "test_adds")) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 caught, 1 survived"
    assert held(fake) == before
    assert not (fake / "build/mutations").exists()


@pytest.mark.parametrize(
    ("new", "test", "said"),
    [
        ("a +", "test_adds", "wrong: "),  # no Python: that the tests do not begin is no failure of theirs
        ("a - b", "test_absent", "without a mutation "),
    ],
)
def test_tests_that_cannot_run_notice_nothing(
    fake: Path, capsys: pytest.CaptureFixture[str], new: str, test: str, said: str
) -> None:
    assert mutate(fake, ("wrong", new, test)) == UsageError.exit_code
    assert capsys.readouterr().err.startswith(f"✗ {said}")


def has_ended(pid: int) -> bool:
    """Whether a process has, be it that nobody asked how."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_changes_nothing_and_the_next_begins_anew(
    fake: Path, how: signal.Signals
) -> None:
    before, begun, path = held(fake), fake / "build/begun", fake.parent / "slow.toml"
    path.write_text(TABLE.format(name="slow", new="a - b", test="test_slow"))
    code = "import pathlib, sys; from tests.mutations import run; sys.exit(run.main([], *map(pathlib.Path, sys.argv[1:])))"
    command = [sys.executable, "-c", code, str(fake), str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until(lambda: begun.is_file() and begun.read_text(), "the test to begin", process)
        process.send_signal(how)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == (130 if how == signal.SIGTERM else -how), said
    assert (fake / "build/mutations").exists() == (how == signal.SIGKILL)
    until(lambda: has_ended(int(begun.read_text())), "the test to end")
    assert mutate(fake, ("noticed", "a - b", "test_adds")) == 0
    assert held(fake) == before
    assert not (fake / "build/mutations").exists()


def test_an_old_text_that_is_not_there_once_is_told(tmp_path: Path) -> None:
    mutation = Mutation(keeps="", kind="program", ring="unit", file="a.py", old="a", new="b", tests=("c",))
    (tmp_path / "a.py").write_text("a = a\n")
    for path, count in ((tmp_path / "a.py", 2), (tmp_path / "absent.py", 0)):
        with pytest.raises(UsageError, match=rf"^twice: its old text is {count} times in a\.py"):
            copies.change(path, "twice", mutation)
    assert (tmp_path / "a.py").read_text() == "a = a\n"

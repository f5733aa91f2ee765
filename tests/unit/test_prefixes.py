from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from scripts import __main__
from scripts.base import layout
from scripts.base.errors import SeriesError, UsageError
from scripts.series import clone, model, prefixes, tree
from tests.unit.conftest import Command, Make, TreeOf

EDITS = [(f"Add part {i}", {f"flash_attn/part_{i}.py": f"part = {i}\n"}) for i in range(1, 6)]
NAMES = ["base", *(f"Add-part-{i}.patch" for i in range(1, 6))]
Applied = tuple[model.Series, tree.Tree]


@pytest.fixture
def applied(make_series: Make, tree_of: TreeOf) -> Applied:
    whole = model.read(make_series(*EDITS))
    return whole, tree_of(whole)


def test_each_runs_after_every_prefix_in_its_tree(applied: Applied, tmp_path: Path) -> None:
    log = tmp_path / "log"
    runs = prefixes.each(
        *applied,
        f'echo "$FA2_PATCH $(ls flash_attn | wc -l) $FA2_SOURCE" >> {log}; test ! -e flash_attn/part_3.py',
        tmp_path / "build",
    )
    assert [r.patch for r in runs] == NAMES
    assert [r.passed for r in runs] == [True] * 3 + [False] * 3
    assert [line.split()[:2] for line in log.read_text().splitlines()] == [
        [name, str(i + 1)] for i, name in enumerate(NAMES)
    ]
    assert {Path(line.split()[2]).name for line in log.read_text().splitlines()} == {"source"}
    assert not list((tmp_path / "build").iterdir())


def test_what_a_run_leaves_does_not_reach_the_next(applied: Applied, tmp_path: Path) -> None:
    runs = prefixes.each(*applied, "test ! -e left && touch left && echo x >> setup.py", tmp_path / "build")
    assert all(r.passed for r in runs)


@pytest.mark.parametrize("first", range(1, 6))
def test_bisect_names_the_first_patch_that_fails(applied: Applied, tmp_path: Path, first: int) -> None:
    found, runs = prefixes.bisect(*applied, f"test ! -e flash_attn/part_{first}.py", tmp_path / "build")
    assert found == NAMES[first]
    assert len(runs) <= 5


def test_bisect_steps_over_what_cannot_be_tested(applied: Applied, tmp_path: Path) -> None:
    skip_third = "case $FA2_PATCH in Add-part-3*) exit 125;; esac; "
    found, _ = prefixes.bisect(*applied, f"{skip_third} test ! -e flash_attn/part_2.py", tmp_path / "build")
    assert found == NAMES[2]
    with pytest.raises(UsageError, match=r"one of Add-part-3\.patch, Add-part-4\.patch; .*125"):
        prefixes.bisect(*applied, f"{skip_third} test ! -e flash_attn/part_4.py", tmp_path / "build")


def test_bisect_tells_what_it_cannot_start_from(applied: Applied, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be tested on upstream"):
        prefixes.bisect(*applied, "exit 125", tmp_path / "build")
    with pytest.raises(UsageError, match="did not find the command"):
        prefixes.bisect(*applied, "absent-command", tmp_path / "build")


def test_bisect_of_what_always_passes_or_always_fails(applied: Applied, tmp_path: Path) -> None:
    assert prefixes.bisect(*applied, "true", tmp_path / "build")[0] is None
    with pytest.raises(UsageError, match="fails on upstream without any patch"):
        prefixes.bisect(*applied, "false", tmp_path / "build")


@pytest.fixture
def view(applied: Applied, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands see this series."""
    monkeypatch.setattr(clone, "view", lambda *_: nullcontext(applied))


@pytest.mark.usefixtures("view")
def test_a_bisect_that_finds_the_patch_has_succeeded(capfd: pytest.CaptureFixture[str]) -> None:
    __main__.main_inner(["bisect", "--run", "test ! -e flash_attn/part_3.py"])
    assert f"✓ {NAMES[3]} is the first patch with which it fails." in capfd.readouterr().out


@pytest.mark.usefixtures("view")
def test_each_names_every_failure() -> None:
    with pytest.raises(
        SeriesError, match=r"(?s)fails on 2 of 6:.*Add-part-4.*status 1.*Add-part-5.*status 1"
    ):
        __main__.main_inner(["each", "--run", "test ! -e flash_attn/part_4.py"])


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        ("exit 125", "could not be tested (125) on base, Add-part-1"),
        ("false", "    upstream itself, without any patch (status 1)"),
    ],
)
def test_each_does_not_call_passed_what_was_not(
    applied: Applied,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    shell: str,
    expected: str,
) -> None:
    monkeypatch.setattr(layout, "BUILD", tmp_path / "build")
    monkeypatch.setattr(clone, "view", lambda loaded, source: nullcontext(applied))
    done = command("each", "--run", shell)
    assert done.status == SeriesError.exit_code
    assert expected in done.err

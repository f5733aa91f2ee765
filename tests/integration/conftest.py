"""What ``nox -s tests`` runs of these tests, what ``.ci/run`` does, and what that takes in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulator import steady  # noqa: F401 - loads the profile of hypothesis
from tests.integration import wheels
from tests.integration.turns import TURNS, lane, turn

_LEFT = pytest.StashKey[list[str]]()  # a line each


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run the cases marked in_turn too whose turn it is, as .ci/run does",
    )
    parser.addoption(
        "--every-turn", action="store_true", help="run --all-cases, and the cases of every turn: hours"
    )


def pytest_report_header(config: pytest.Config) -> str:
    if not config.getoption("--all-cases") or config.getoption("--every-turn"):
        return ""
    return f"cases in turn: {turn(TURNS)} of 0 to {TURNS - 1}, by the number of commits (all: --every-turn)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_turn = _turns(config)
    left_out = []
    for item in items:
        in_turn = item.get_closest_marker("in_turn")
        of_release = item.get_closest_marker("release") and not config.getoption("--every-turn")
        if of_release or (in_turn and not is_turn(*in_turn.args)):
            left_out.append(item)
    items[:] = [item for item in items if item not in left_out]
    config.stash[_LEFT] = [_left(item) for item in left_out]
    config.hook.pytest_deselected(items=left_out)


def _left(item: pytest.Item) -> str:
    marker = item.get_closest_marker("in_turn")
    turns = f"turn {', '.join(map(str, marker.args))}" if marker else "left to a release"
    return f"{turns}: {item.nodeid}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of --dist=loadfile: what is apart by file, and all else in one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = lane
    return scheduler


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told["left"] = session.config.stash.get(_LEFT, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each process leaves the same to others."""
    node.config.stash[_LEFT] = getattr(node, "workeroutput", {}).get("left", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left to other turns."""
    left_out = config.stash.get(_LEFT, [])
    if not left_out or not (config.getoption("--all-cases") or "passed" not in terminalreporter.stats):
        return
    terminalreporter.section(f"left to other turns: {len(left_out)} cases; --every-turn runs them")
    for line in left_out:
        terminalreporter.write_line(line)


def _turns(config: pytest.Config) -> Callable[..., bool]:
    turns: set[int] = set()
    if config.getoption("--every-turn"):
        turns = set(range(TURNS))
    elif config.getoption("--all-cases"):
        turns = {turn(TURNS)}

    def is_turn(*own: int) -> bool:
        if not own or not set(range(TURNS)).issuperset(own):
            raise pytest.UsageError(f"in_turn{own}: name turns from 0 to {TURNS - 1}.")
        return not turns.isdisjoint(own)

    return is_turn


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of one kernel file, by the build's own command. Tests copy what they change."""
    out = tmp_path_factory.mktemp("dist")
    wheels.build(out)
    (path,) = out.glob("*.whl")
    return path

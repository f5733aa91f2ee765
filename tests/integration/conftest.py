"""What ``nox -s tests`` leaves out for time, what ``--all-cases`` runs, and what it runs in turn."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.integration.turns import TURNS, turn


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run the cases marked long too, and of those marked in_turn the ones whose turn it is, as .ci/run does",
    )
    parser.addoption(
        "--every-turn",
        action="store_true",
        help="run --all-cases, and all that is run in turn: cases, torches, and the problems that are drawn",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--every-turn"):
        config.option.all_cases = True
        os.environ["TORCHES"] = "all"


def pytest_report_header(config: pytest.Config) -> str:
    if not config.getoption("--all-cases") or config.getoption("--every-turn"):
        return ""
    return f"cases in turn: {turn(TURNS)} of 0 to {TURNS - 1}, by the number of commits (all: --every-turn)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_turn = _turns(config)
    left_out = []
    for item in items:
        in_turn = item.get_closest_marker("in_turn")
        long = item.get_closest_marker("long") and not config.getoption("--all-cases")
        if long or (in_turn and not is_turn(*in_turn.args)):
            left_out.append(item)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _turns(config: pytest.Config) -> Callable[..., bool]:
    turns: set[int] = set()
    if config.getoption("--all-cases"):
        turns = set(range(TURNS)) if config.getoption("--every-turn") else {turn(TURNS)}

    def is_turn(*own: int) -> bool:
        if not own or not set(range(TURNS)).issuperset(own):
            raise pytest.UsageError(f"in_turn{own}: name turns from 0 to {TURNS - 1}.")
        return not turns.isdisjoint(own)

    return is_turn


@pytest.fixture(scope="session")
def all_cases(pytestconfig: pytest.Config) -> bool:
    """Whether the cases marked long run, so that a fixture need not compile what only they look at."""
    return bool(pytestconfig.getoption("--all-cases"))


@pytest.fixture(scope="session")
def is_turn(pytestconfig: pytest.Config) -> Callable[..., bool]:
    """The same of cases marked in_turn, by their turns."""
    return _turns(pytestconfig)


@pytest.fixture(scope="session")
def every_turn(pytestconfig: pytest.Config) -> bool:
    """Whether nothing is left for another run."""
    return bool(pytestconfig.getoption("--every-turn"))

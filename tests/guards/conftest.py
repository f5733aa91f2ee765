"""Tests that guard a patch: they get a tree of upstream with a part of the series, without cutlass (nox -s guards)."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tree", metavar="DIR", type=Path, required=True, help="the tree")


@pytest.fixture
def tree(request: pytest.FixtureRequest) -> Path:
    return Path(request.config.getoption("--tree"))

"""The wheel suite: proves an installed ``flash_attn`` on a GPU. Needs torch, pytest and the wheel, no more.

    python -m pytest tests/wheel --proof proof.json

Exit status 0 means verified. Without a GPU the static half runs, the rest is reported as not run, and
the status is 30: not verified; so it is where somebody chose cases. A run in which no negative control
differed fails: it shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ledger
import pytest
from ledger import (  # noqa: F401 - hooks and fixtures, which pytest looks for here
    control,
    entry,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_deselected,
    pytest_runtest_makereport,
    pytest_terminal_summary,
    pytest_testnodedown,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    ledger.add_options(parser)
    parser.addoption(
        "--upstream",
        metavar="FILE",
        default=None,
        help="tests/test_flash_attn.py of upstream's release, to run cases of",
    )
    parser.addoption(
        "--stock",
        metavar="FILE",
        default=None,
        help="upstream's kernels (nox -s build -- --stock), to run those of its cases on that fail",
    )
    parser.addoption(
        "--upstream-cases",
        metavar="N",
        type=int,
        default=40,
        help="how many of each of its tests (default: 40)",
    )
    parser.addoption(
        "--cpp-tests",
        metavar="FILE",
        default=None,
        help="the program that tests the wheel's library for C++ (nox -s verify -- --write-cpp-tests)",
    )


def pytest_configure(config: pytest.Config) -> None:
    ledger.configure(config, Path(__file__).resolve().parent)
    config.addinivalue_line("markers", "sanitizer: small enough for compute-sanitizer")


@pytest.fixture(autouse=True)
def _mode_off() -> Iterator[None]:
    """Every test starts and ends with the mode off."""
    from flash_attn import set_deterministic_mode

    set_deterministic_mode(False)
    yield
    set_deterministic_mode(False)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    import flash_attn

    ledger.finish(session, exitstatus, flash_attn.fork_info)

"""The suite of the flash_attn_4 wheel: needs torch, pytest, what the wheel requires, and tests/wheel beside it.

    python -m pytest tests/wheel4 --proof proof.json --contract contract.json

As in tests/wheel, 0 means verified, and 30 that the GPU half did not run. Without a GPU its cases run on tensors that
have no values, to compile every kernel that they call for SM 9.0, or for the architecture that ``--arch`` names. They
count as not run.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "wheel"))

import compiled
import ledger
import machine
import parts
from ledger import (  # noqa: F401 - hooks and fixtures, which pytest looks for here
    entry,
    pytest_collection_finish,
    pytest_deselected,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)
from without_values import compiling

CONTRACT, KERNELS = "contract", "kernels"  # their keys in the ledger's entries
COMPILED = "not run: no CUDA device; their kernels compile"
_made: Path | None = None  # the folder of kernels that goes at the end


def pytest_addoption(parser: pytest.Parser) -> None:
    ledger.add_options(parser)
    parser.addoption(
        "--contract", metavar="FILE", default=None, help="write the contract's table here, as JSON"
    )
    parser.addoption(
        "--kernels",
        metavar="DIR",
        default=None,
        help="where there is a GPU, keep compiled kernels here (default: a folder that goes at the end)",
    )
    parser.addoption(
        "--remember",
        metavar="DIR",
        default=None,
        help="where there is no GPU, note here which kernels compile, and leave out those that are noted",
    )
    parser.addoption(
        "--arch",
        default="sm_90",
        help="what to compile for where there is no GPU: sm_80, sm_90 (the default), sm_100 or sm_120",
    )
    parts.add_option(parser, "the GPU half's cases, and others that compile as long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts.deselect(config, items, [i for i in items if any(map(i.get_closest_marker, ("gpu", "in_parts")))])


def pytest_configure(config: pytest.Config) -> None:
    global _made  # noqa: PLW0603
    ledger.configure(config, Path(__file__).resolve().parent)
    config.addinivalue_line("markers", "in_parts: --part divides these too, which need no GPU")
    folder = config.getoption("--kernels") if machine.GPU else None
    if not hasattr(config, "workerinput"):  # whose environment is this one's
        if folder is None:
            folder = tempfile.mkdtemp(prefix="flash_attn_4-kernels-")
            _made = Path(folder)
        known = config.getoption("--remember")
        machine.prepare(
            Path(folder).resolve(), config.getoption("--arch"), Path(known).resolve() if known else None
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    if _made is not None and not hasattr(config, "workerinput"):
        shutil.rmtree(_made, ignore_errors=True)


@pytest.fixture(autouse=True)
def _mode_off() -> Iterator[None]:
    """Every test starts and ends with the mode off."""
    from flash_attn.cute import set_deterministic_mode

    set_deterministic_mode(False)
    yield
    set_deterministic_mode(False)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Without a GPU, the calls of a case of the GPU half are compiled, and nothing is shown of their results."""
    if machine.GPU or not pyfuncitem.get_closest_marker("gpu"):
        return (yield)
    with compiling():
        yield
    pytest.skip(COMPILED)


@pytest.fixture
def control(request: pytest.FixtureRequest) -> Any:
    """Record a negative control: ``control(differs, must_differ=True)``; without a GPU, nothing differs."""
    return ledger.recorder(request) if machine.GPU else lambda *_, **__: None


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Any:
    """Record a cell of the contract's table: ``cell(row, column, differing, of)``."""
    cells = request.config.stash[ledger.LEDGER].entries.setdefault(CONTRACT, [])

    def record(row: str, column: str, differing: int, of: int) -> None:
        if machine.GPU:
            cells.append({"row": row, "column": column, "differing": differing, "of": of})

    return record


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of pytest-xdist: each process has cells of its own, which entries alone would overwrite."""
    output = getattr(node, "workeroutput", {}).get("ledger")
    if output is not None:
        whole = node.config.stash[ledger.LEDGER]
        cells = whole.entries.get(CONTRACT, []) + output["entries"].get(CONTRACT, [])
        whole.add(output)
        whole.entries[CONTRACT] = cells


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    from flash_attn import cute

    if _made is not None and not machine.GPU:
        found = session.config.stash[ledger.LEDGER].entries[KERNELS] = compiled.figures(_made)
        done = found["compiled"] + found["remembered"]
        if exitstatus == pytest.ExitCode.OK and found["asked_for"] != done:
            exitstatus = session.exitstatus = pytest.ExitCode.TESTS_FAILED
    ledger.finish(session, exitstatus, lambda: {**cute.fork_info(), "toolchain": machine.toolchain()})
    target = session.config.getoption("--contract")
    if target is None or hasattr(session.config, "workerinput"):
        return
    cells = session.config.stash[ledger.LEDGER].entries.get(CONTRACT, [])
    machine.write_contract(Path(target), sorted(cells, key=lambda c: (c["row"], c["column"])))


os.environ.setdefault("OMP_NUM_THREADS", "2")  # as many processes as cores run beside each other

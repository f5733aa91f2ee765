"""What a run of a suite has found, and the proof that it leaves: pytest's hooks for the conftest.py of a suite.

tests/wheel4 uses them too. A suite's own ``pytest_addoption`` calls :func:`add_options`, its
``pytest_sessionfinish`` calls :func:`finish`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import Mismatch

NOT_VERIFIED = 30  # none of pytest's own
PROOF_FORMAT = 1


def add_options(parser: pytest.Parser) -> None:
    """The options of every suite."""
    parser.addoption("--proof", metavar="FILE", default=None, help="write the results here, as JSON")
    parser.addoption(
        "--wheel",
        metavar="FILE",
        default=None,
        help="the wheel that is installed, for its sha256 in the proof",
    )


def configure(config: pytest.Config, folder: Path) -> None:
    """Begin; ``folder``: the suite's, of which all tests must run for a proof."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.stash[LEDGER], config.stash[FOLDER] = Ledger(), folder


class Ledger:
    """What the proof will hold."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, Any]] = {}
        self.controls: list[dict[str, Any]] = []
        self.entries: dict[str, Any] = {}
        self.chosen = False  # cases were, so that not all of the suite ran

    def add(self, other: dict[str, Any]) -> None:
        """What a process of pytest-xdist has found."""
        self.cases |= other["cases"]
        self.controls += other["controls"]
        self.entries |= other["entries"]
        self.chosen |= other["chosen"]

    def control_failed(self) -> bool:
        ran = [c for c in self.controls if c["must_differ"]]
        return bool(ran) and not any(c["differs"] for c in ran)


LEDGER = pytest.StashKey[Ledger]()
FOLDER = pytest.StashKey[Path]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="not run: no CUDA device"))


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        item.config.stash[LEDGER].chosen = True


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.pluginmanager.hasplugin("dsession"):
        return  # pytest-xdist: those that run the cases collect them
    folder = session.config.stash[FOLDER]
    whole = {path.resolve() for path in folder.glob("test_*.py")}
    if any(Path(argument).resolve() != folder for argument in session.config.args) or whole - {
        item.path.resolve() for item in session.items
    }:
        session.config.stash[LEDGER].chosen = True


@pytest.fixture
def control(request: pytest.FixtureRequest) -> Any:
    """Record a negative control: ``control(differs, must_differ=True)``."""
    return recorder(request)


def recorder(request: pytest.FixtureRequest) -> Any:
    """What records the negative controls of a case."""

    def record(differs: bool, must_differ: bool = True) -> None:
        ledger = request.config.stash[LEDGER]
        ledger.controls.append({"case": request.node.nodeid, "differs": differs, "must_differ": must_differ})

    return record


@pytest.fixture
def entry(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Entries of the proof beside those of every case."""
    return request.config.stash[LEDGER].entries


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    case = item.config.stash[LEDGER].cases.setdefault(item.nodeid, {"outcome": "passed", "seconds": 0.0})
    case["seconds"] = round(case["seconds"] + call.duration, 4)
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        case.update(outcome="not run" if reason.startswith("not run") else "skipped", reason=reason)
    elif report.failed:
        case["outcome"] = "failed"
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, Mismatch):
            case["mismatch"] = error.details
        else:
            case["error"] = str(error)[:2000]
    return report


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = (
            subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
        )
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": driver,
    }


def _wheel(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    return {"name": Path(path).name, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


def finish(session: pytest.Session, exitstatus: int, fork_info: Callable[[], dict[str, Any]]) -> None:
    """The end of a run: its exit status, and the proof."""
    ledger = session.config.stash[LEDGER]
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["ledger"] = vars(ledger)
        return
    outcomes = Counter(case["outcome"] for case in ledger.cases.values())
    if exitstatus == pytest.ExitCode.OK and ledger.control_failed():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif exitstatus == pytest.ExitCode.OK and (outcomes["not run"] or ledger.chosen):
        session.exitstatus = NOT_VERIFIED
    target = session.config.getoption("--proof")
    broken_off = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
    if target is None or session.config.option.collectonly or broken_off:
        return
    proof = {
        "format": PROOF_FORMAT,
        "verified": session.exitstatus == pytest.ExitCode.OK and bool(outcomes["passed"]),
        "counts": dict(sorted(outcomes.items())),
        "wheel": _wheel(session.config.getoption("--wheel")),
        "fork": fork_info(),
        "gpu": _gpu(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "controls": ledger.controls,
        "cases": ledger.cases,
        **ledger.entries,
    }
    # Of all the rest: a proof that was changed does not pass for one (scripts/base/sealed.py).
    proof = json.loads(json.dumps(proof))  # numbers that are keys become text, which sorts otherwise
    said = json.dumps(proof, sort_keys=True, separators=(",", ":"))
    proof["digest"] = hashlib.sha256(said.encode()).hexdigest()
    aside = Path(f"{target}.part")
    aside.write_text(json.dumps(proof, indent=1) + "\n", encoding="utf-8")
    aside.replace(target)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of pytest-xdist: a process has ended. One that died has told nothing, and pytest fails for it."""
    if "ledger" in getattr(node, "workeroutput", {}):
        node.config.stash[LEDGER].add(node.workeroutput["ledger"])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    ledger = config.stash[LEDGER]
    must = [c for c in ledger.controls if c["must_differ"]]
    if must:
        differing = sum(c["differs"] for c in must)
        terminalreporter.write_line(f"negative controls: {differing} of {len(must)} differ with the mode off")
        if ledger.control_failed():
            terminalreporter.write_line("NO NEGATIVE CONTROL DIFFERED: these cases show nothing", red=True)
    not_run = Counter(case["reason"] for case in ledger.cases.values() if case["outcome"] == "not run")
    if ledger.chosen:
        terminalreporter.write_line("NOT VERIFIED: only chosen cases ran", yellow=True)
    for reason, count in not_run.items():
        terminalreporter.write_line(
            f"NOT VERIFIED: {count} GPU cases {reason.replace('not run: ', 'not run, ')}", yellow=True
        )

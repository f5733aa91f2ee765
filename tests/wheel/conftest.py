"""The wheel suite: proves an installed ``flash_attn`` on a GPU. Needs torch, pytest and the wheel, no more.

    python -m pytest tests/wheel --proof proof.json

Exit status 0 means verified. Without a GPU the static half runs, the rest is reported as not run, and
the status is 30: not verified; so it is where somebody chose cases. A run in which no negative control
differed fails: it shows nothing.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch

NOT_VERIFIED = 30  # none of pytest's own
PROOF_FORMAT = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proof", metavar="FILE", default=None, help="write the results here, as JSON")
    parser.addoption(
        "--wheel",
        metavar="FILE",
        default=None,
        help="the wheel that is installed, for its sha256 in the proof",
    )
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


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "sanitizer: small enough for compute-sanitizer")
    config.stash[LEDGER] = Ledger()


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
    folder = Path(__file__).resolve().parent
    whole = {path.resolve() for path in folder.glob("test_*.py")}
    if any(Path(argument).resolve() != folder for argument in session.config.args) or whole - {
        item.path.resolve() for item in session.items
    }:
        session.config.stash[LEDGER].chosen = True


@pytest.fixture(autouse=True)
def _mode_off() -> Iterator[None]:
    """Every test starts and ends with the mode off."""
    from flash_attn import set_deterministic_mode

    set_deterministic_mode(False)
    yield
    set_deterministic_mode(False)


@pytest.fixture
def control(request: pytest.FixtureRequest) -> Any:
    """Record a negative control: ``control(differs, must_differ=True)``."""

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
        if isinstance(error, harness.Mismatch):
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


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
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
    import flash_attn

    proof = {
        "format": PROOF_FORMAT,
        "verified": session.exitstatus == pytest.ExitCode.OK and bool(outcomes["passed"]),
        "counts": dict(sorted(outcomes.items())),
        "wheel": _wheel(session.config.getoption("--wheel")),
        "fork": flash_attn.fork_info(),
        "gpu": _gpu(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "controls": ledger.controls,
        "cases": ledger.cases,
        **ledger.entries,
    }
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

"""Upstream's own ``tests/test_flash_attn.py`` on an installed flash_attn: what of it is run, and a pytest plugin that does.

Upstream's file has a third of a million cases, hours of them. Of each of its tests as many as asked for are drawn, the
same in every run, from those whose kernels the wheel has. Each runs with the mode off and on. Nothing else is left out:
what upstream skips is counted with its reason. One that fails can be run on upstream's own kernels (``--stock``), to know
whether it is this wheel's fault.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flash_attn
import pytest
from extension_files import load
from kernel_names import DIMS, needed

TRIES = 1000  # draws for each case wanted, before a test counts as having no more that fit

Outcomes = dict[str, dict[str, str]]  # by case and mode: "passed", or "failed: …", "skipped: …" and why


def spell(parameters: dict[str, Any]) -> str:
    """The name of a case."""
    return "-".join(
        f"{name}={str(value).removeprefix('torch.')}" for name, value in sorted(parameters.items())
    )


def any_whole(kernels: frozenset[str]) -> bool:
    """Whether there are all passes of some head dim and dtype: a case may call any of them."""
    return any(needed(dim, dtype) <= kernels for dim in DIMS for dtype in ("fp16", "bf16"))


@dataclass(frozen=True)
class Choice:
    """Which cases, and on what they run.

    Attributes:
        count: so many of each test,
        kernels: of those that need these alone
        longest: and have no sequence over that.
        only: of these, the ones of these names; all where it is None.
        stock: upstream's extension, on which they run; where it is None, on the wheel, with the mode off and on.
    """

    count: int
    kernels: frozenset[str]
    longest: int = sys.maxsize
    only: frozenset[str] | None = None
    stock: Path | None = None

    @property
    def modes(self) -> list[str]:
        """In which a case runs."""
        return ["off", "on"] if self.stock is None else ["stock"]

    def takes(self, name: str, parameters: dict[str, Any]) -> bool:
        """Whether a drawn case of a test is run."""
        return self.only is None or f"{name}[{spell(parameters)}]" in self.only

    def fits(self, parameters: dict[str, Any]) -> bool:
        """Whether a case may be drawn."""
        kernels = needed(parameters["d"], "bf16" if "bfloat16" in str(parameters["dtype"]) else "fp16")
        lengths = [
            value
            for name, value in parameters.items()
            if name.startswith("seqlen") and not isinstance(value, bool)
        ]
        return kernels <= self.kernels and max(lengths, default=0) <= self.longest

    def draw(self, name: str, axes: list[tuple[tuple[str, ...], list[Any]]]) -> list[dict[str, Any]]:
        """Cases of a test: combinations of its axes, each names of parameters and their values."""
        total = math.prod(len(values) for _, values in axes)
        numbers = random.Random(name).sample(range(total), min(total, self.count * TRIES))  # noqa: S311 - not for secrets
        every = (_combination(axes, number) for number in numbers)
        return list(itertools.islice(filter(self.fits, every), self.count))


def _combination(axes: list[tuple[tuple[str, ...], list[Any]]], number: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for names, values in axes:
        number, place = divmod(number, len(values))
        value = values[place]
        found.update(zip(names, value if len(names) > 1 else (value,), strict=True))
    return found


def _axis(mark: pytest.Mark) -> tuple[tuple[str, ...], list[Any]]:
    names, values = mark.args
    return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names), list(
        values
    )


class _Stock:
    """Upstream's extension under the names by which the wheel's Python calls its own."""

    def __init__(self, file: Path) -> None:
        self._module, self.calls = load(file), 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls += 1
            if name == "fork_fwd_kvcache":
                *arguments, mask, bias, sink = arguments  # type: ignore[assignment]
                assert mask is bias is sink is None
            return getattr(self._module, name.removeprefix("fork_"))(*arguments)

        return call


@contextmanager
def on_stock(file: Path) -> Iterator[None]:
    """Calls without a mask, a bias or a sink go to upstream's kernels, and none takes the way past them."""
    kernels, fa4 = flash_attn.fork_kernels, flash_attn.fork_fa4
    own, asked, stock = fa4.own, kernels.ON, _Stock(file)
    fa4.own, kernels.ON = stock, True
    try:
        yield
        if not stock.calls:
            raise RuntimeError("no call reached upstream's kernels")
    finally:
        fa4.own, kernels.ON = own, asked


class Plugin:
    """Draws the cases of the file that pytest collects, runs each in every mode, and keeps what came of it."""

    def __init__(self, choice: Choice, target: Path) -> None:
        self.choice = choice
        self.target = target
        self.outcomes: Outcomes = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, name: str, obj: object) -> list[pytest.Item] | None:
        marks = [mark for mark in getattr(obj, "pytestmark", ()) if mark.name == "parametrize"]
        if not (inspect.isfunction(obj) and name.startswith("test") and marks):
            return None
        drawn = self.choice.draw(name, [_axis(mark) for mark in marks])
        cases = [case for case in drawn if self.choice.takes(name, case)]
        if not cases:
            return []
        names = sorted(cases[0])
        own = pytest.mark.parametrize(
            names, [tuple(case[n] for n in names) for case in cases], ids=[spell(case) for case in cases]
        )
        obj.pytestmark = [mark for mark in obj.pytestmark if mark.name != "parametrize"] + [own.mark]  # type: ignore[attr-defined]
        return None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize("fork_mode", self.choice.modes, indirect=True)

    @pytest.fixture(autouse=True)
    def fork_mode(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if self.choice.stock is None:
            with flash_attn.deterministic_mode(enabled=request.param == "on"):
                yield
        else:
            with on_stock(self.choice.stock):
                yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function) -> Iterator[Any]:
        report = yield
        parameters = dict(item.callspec.params)
        mode = parameters.pop("fork_mode")
        of_case = self.outcomes.setdefault(f"{item.originalname}[{spell(parameters)}]", {})
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            of_case[mode] = f"skipped: {reason.removeprefix('Skipped: ')}"
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            of_case[mode] = f"failed: {(crash.message if crash else report.longreprtext)[:500]}"
        elif report.when == "call":
            of_case[mode] = "passed"
        return report

    def pytest_sessionfinish(self) -> None:
        aside = self.target.with_suffix(".part")
        aside.write_text(json.dumps(self.outcomes), encoding="utf-8")
        aside.replace(self.target)


def pytest_configure(config: pytest.Config) -> None:
    """Of the process that :func:`run` starts."""
    told = json.loads(os.environ["FORK_UPSTREAM_CASES"])
    only, stock = told["only"], told["stock"]
    choice = Choice(
        told["count"],
        frozenset(told["kernels"]),
        told["longest"],
        only and frozenset(only),
        stock and Path(stock),
    )
    config.pluginmanager.register(Plugin(choice, Path(told["target"])), "fork-upstream-cases")


def run(file: Path, choice: Choice, folder: Path) -> Outcomes:
    """Run cases of a test file in a process of their own.

    Args:
        file: upstream's ``tests/test_flash_attn.py``.
        choice: which cases.
        folder: for what the process leaves behind.

    Raises:
        RuntimeError: the process came to no end of its own, or ran nothing.
    """
    file, target = file.resolve(), folder.resolve() / "outcomes.json"  # the process runs elsewhere
    told = {
        "count": choice.count,
        "kernels": sorted(choice.kernels),
        "longest": choice.longest,
        "only": None if choice.only is None else sorted(choice.only),
        "stock": None if choice.stock is None else str(choice.stock.resolve()),
        "target": str(target),
    }
    path = [
        str(Path(part).resolve())
        for part in (*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), Path(__file__).parent)
    ]
    env = {**os.environ, "FORK_UPSTREAM_CASES": json.dumps(told), "PYTHONPATH": os.pathsep.join(path)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(file),
        "-p",
        "upstream_cases",
        "-c",
        os.devnull,
        f"--rootdir={file.parent}",
    ]
    command += ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:warnings"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(
            f"pytest exited with {done.returncode} on {file.name}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    outcomes: Outcomes = json.loads(target.read_text(encoding="utf-8"))
    target.unlink()
    return outcomes


def counts(outcomes: Outcomes) -> dict[str, dict[str, int]]:
    """By mode: how many passed, failed, and were skipped for each of upstream's reasons."""
    found: dict[str, Counter[str]] = {}
    for of_case in outcomes.values():
        for mode, outcome in of_case.items():
            found.setdefault(mode, Counter())["failed" if outcome.startswith("failed") else outcome] += 1
    return {mode: dict(sorted(of_mode.items())) for mode, of_mode in found.items()}


def is_upstreams_own(of_case: dict[str, str]) -> bool:
    """Whether a case that failed misses a bound on stock too, and with the mode off; and with it on misses a bound, if it fails."""
    missed = {
        mode: outcome.startswith(("failed: assert", "failed: AssertionError"))
        for mode, outcome in of_case.items()
    }
    return missed.get("stock", False) and missed["off"] and (missed["on"] or of_case["on"] == "passed")


def failures(outcomes: Outcomes) -> Outcomes:
    """The cases that failed in a mode."""
    return {
        case: of_case
        for case, of_case in outcomes.items()
        if any(outcome.startswith("failed") for outcome in of_case.values())
    }

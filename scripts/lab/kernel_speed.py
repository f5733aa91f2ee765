"""Measure a wheel's kernels on a GPU beside upstream's of the same pin, hold the figures against the goals, and draw them.

``tests/wheel/bench.py`` measures, with nothing but torch and the wheel; this builds what it measures, and tells what came out.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.base import console, layout
from scripts.base.errors import NotVerified, UsageError, VerifyError
from scripts.wheels import build, choice, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scripts.source import matrix

KERNELS = "hdim64,hdim128,fp16"
SUITE = layout.ROOT / "tests/wheel"

# The design that this fork replaces, with splits of 512 keys: accumulators of all splits in memory, reduced by PyTorch's
# operations. Measured on an H200 with 2.8.3, head dim 64, fp16, 32 heads, no mask: time as a multiple of upstream's, and MiB.
_NAIVE = ((4, 2048, 1.087 / 0.460, 650.0), (8, 4096, 7.682 / 3.368, 4680.0))

Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """One figure beside its goal: ``value`` and ``goal`` in ``unit``, or nothing where the rows that it needs are not there."""

    what: str
    value: float | None
    goal: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the goal is; ``None`` where nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def _by_case(rows: Sequence[Row], group: str) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["group"] == group:
            found.setdefault(row["case"], {})[row["variant"]] = row
    return found


def _ratios(
    rows: Sequence[Row],
    group: str,
    variant: str,
    base: Sequence[str] = ("stock",),
    only: Callable[[Row], bool] = lambda _: True,
) -> list[float]:
    """The variant's time over the best of ``base``, for each case of a group that has both."""
    return [
        case[variant]["ms"] / min(case[name]["ms"] for name in base if name in case)
        for case in _by_case(rows, group).values()
        if variant in case and base[0] in case and only(case[variant])
    ]


def _extra(rows: Sequence[Row], group: str) -> list[float]:
    return [
        case["on"]["mb"] - case["stock"]["mb"]
        for case in _by_case(rows, group).values()
        if {"on", "stock"} <= case.keys()
    ]


def _mean(values: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def _worst(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The figures that deterministic mode is held to, against stock of the same pin."""
    prefill, decode, backward = (_ratios(rows, group, "on") for group in ("prefill", "decode", "backward"))
    one_chunk = _ratios(rows, "prefill", "on 2048", only=lambda row: row["len_k"] <= 2048)
    chunked = _ratios(rows, "chunked", "on", ("stock", "stock, one split"))
    against_one = [
        1 / r
        for r in _ratios(
            rows,
            "decode",
            "on",
            ("stock, one split",),
            lambda row: (row["batch"], row["len_k"]) == (1, 131072),
        )
    ]
    million = [case["on"]["ms"] for case in _by_case(rows, "million keys").values()]
    return [
        Goal("prefill, default split_size: geometric mean", _mean(prefill), 1.05, "×"),
        Goal("prefill, default split_size: the worst", _worst(prefill), 1.10, "×"),
        Goal("prefill, keys within one chunk: the worst", _worst(one_chunk), 1.01, "×"),
        Goal("prefill: memory above stock's, the most", _worst(_extra(rows, "prefill")), 1, "MiB"),
        Goal("prefill, split_size 512: geometric mean", _mean(_ratios(rows, "prefill", "on 512")), 1.15, "×"),
        Goal("512 new tokens on 16 k and 128 k, against stock's best: the worst", _worst(chunked), 1.05, "×"),
        Goal("decode, default split_size: geometric mean", _mean(decode), 1.0, "×"),
        Goal("decode, default split_size: the worst", _worst(decode), 1.10, "×"),
        Goal(
            "decode, batch 1 and 128 k keys: times faster than one split",
            min(against_one, default=None),
            15,
            "×",
            at_least=True,
        ),
        Goal("backward, against stock's deterministic=True: the worst", _worst(backward), 1.10, "×"),
        Goal("backward: memory above stock's, the most", _worst(_extra(rows, "backward")), 1, "MiB"),
        Goal(
            "512 queries on 2**20 keys: runs", float(len(million)) if million else None, 1, "", at_least=True
        ),
        Goal(
            "mode off, against stock, prefill: geometric mean",
            _mean(_ratios(rows, "prefill", "off")),
            1.01,
            "×",
        ),
    ]


def draw(facts: dict[str, Any], path: Path) -> None:
    """Time and memory over the length of sequences, 32768 tokens in all, as a picture (its kind by the name's suffix)."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - needed for this alone
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as e:
        raise UsageError(
            "--picture needs matplotlib: pip install matplotlib, or nox -s bench, which installs it."
        ) from e
    rows = [row for row in facts["rows"] if row["group"] == "length" and row["head_dim"] == 64]
    figure = Figure(figsize=(10, 4), layout="constrained")
    time, memory = figure.subplots(1, 2)
    labels = {
        "stock": "upstream",
        "on": "deterministic, default split_size",
        "on 512": "deterministic, split_size 512",
    }
    for variant, label in labels.items():
        mine = [row for row in rows if row["variant"] == variant]
        lengths = [row["len_k"] for row in mine]
        time.plot(lengths, [row["ratio"] for row in mine], marker="o", label=label)
        memory.plot(lengths, [row["mb"] for row in mine], marker="o", label=label)
    lengths = [length for _, length, _, _ in _NAIVE]
    naive = {
        "marker": "x",
        "linestyle": "",
        "color": "tab:red",
        "label": "accumulators in memory, split 512 (2.8.3, H200)",
    }
    time.plot(lengths, [ratio for _, _, ratio, _ in _NAIVE], **naive)
    memory.plot(lengths, [mib * 32768 / (batch * length) for batch, length, _, mib in _NAIVE], **naive)
    for axes, title in (
        (time, "time, as a multiple of upstream's"),
        (memory, "memory above the inputs, MiB"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("length of a sequence")
        axes.set_title(title)
        axes.grid(visible=True, alpha=0.3)
    time.set_ylim(bottom=0)
    memory.set_yscale("log")
    time.legend()
    figure.suptitle(
        f"{facts['gpu']}, torch {facts['torch']}: 32768 tokens, 32 heads, head dim 64, fp16, no mask"
    )
    aside = path.with_name(f".{path.name}")
    try:
        with mpl.rc_context({"svg.hashsalt": path.name}):  # the same figures give the same file
            figure.savefig(
                aside,
                format=path.suffix.removeprefix("."),
                metadata={"Date": None} if path.suffix == ".svg" else None,
            )
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """What ``tests/wheel/bench.py --json`` wrote.

    Raises:
        UsageError: it is no such file, or was measured without stock beside it.
    """
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        needed = ("group", "case", "variant", "ms", "mb", "ratio", "batch", "len_k", "head_dim")
        lacking = [key for row in facts["rows"] for key in needed if key not in row] or [
            key for key in ("gpu", "torch") if key not in facts
        ]
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}.") from e
    except (ValueError, KeyError, TypeError) as e:
        raise UsageError(
            f"{path} is not what tests/wheel/bench.py --json writes: {type(e).__name__}: {e}."
        ) from e
    if lacking:
        raise UsageError(f"{path} is not what tests/wheel/bench.py --json writes: it lacks {lacking[0]!r}.")
    if not any(row["variant"] == "stock" for row in facts["rows"]):
        raise UsageError(
            f"{path} was measured without stock: run tests/wheel/bench.py with --stock (nox -s build -- --stock makes it)."
        )
    return facts


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def require_gpu() -> None:
    """Say where else one could measure, where there is no GPU here.

    Raises:
        NotVerified: there is none.
    """
    if not _has_gpu():
        raise NotVerified(
            "nothing was measured: there is no CUDA device here. On a GPU host run this; or build here (nox -s build -- --kernels "
            f"{KERNELS}, and the same with --stock), and there python tests/wheel/bench.py --stock EXTENSION --json bench.json, "
            "then here nox -s bench -- kernels --from bench.json."
        )


def measure(loaded: matrix.Matrix, job: choice.Job, options: build.BuildOptions, result: Path) -> None:
    """Build the wheel and stock's extension, and run the benchmark with both, in an environment of their own.

    Raises:
        VerifyError: the benchmark failed.
    """
    place = build.Place(layout.BUILD, layout.BUILD / "bench" / "dist", cache=True)
    made, stock = (
        build.build_one(loaded, job, replace(options, stock=stock), place).path for stock in (False, True)
    )
    facts = verify.facts_of(made)
    environments = layout.BUILD / "env"
    with tempfile.TemporaryDirectory(dir=environments, prefix="bench-") as folder:
        python = verify.installed(facts, Path(folder) / "venv", layout.BUILD / "logs")
        shutil.copy(SUITE / "bench.py", folder)
        console.step("Measuring")
        command = [python, "bench.py", "--stock", stock.resolve(), "--json", result.resolve()]
        status = subprocess.run(
            [str(c) for c in command], cwd=folder, env={**os.environ, "PYTHONPATH": ""}, check=False
        ).returncode
    if status != 0:
        raise VerifyError(f"the benchmark failed: it exited with {status}; its output is above.")

"""Figures of kernels on a GPU, as ``tests/wheel/bench.py --json`` writes them, and their goals."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from scripts.base import documents
from scripts.base.documents import OpenDocument
from scripts.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Row(OpenDocument):
    """What one variant took for one case."""

    group: str
    case: str
    variant: str  # stock, off, on, or on with a split_size
    ms: float  # the median
    mb: float  # MiB above the inputs
    ratio: float  # of ms, to the group's first variant
    batch: int
    len_k: int
    head_dim: int


class Figures(OpenDocument):
    """What the file holds; it has more, for readers."""

    format: Literal[1] = 1  # files from before it was written have none
    gpu: str
    torch: str
    rows: tuple[Row, ...]


def read(path: Path) -> Figures:
    """The figures in a file.

    Raises:
        UsageError: it is no such file, or was measured without stock beside it.
    """
    remedy = "give a file that tests/wheel/bench.py --json wrote"
    figures = documents.read(Figures, path, error=UsageError, remedy=remedy)
    if not any(row.variant == "stock" for row in figures.rows):
        raise UsageError(
            f"{path} was measured without stock: run tests/wheel/bench.py with --stock "
            "(nox -s build -- --stock makes it)."
        )
    return figures


@dataclass(frozen=True)
class Goal:
    """One figure beside its goal, both in ``unit``; no value where the rows that it needs are not there."""

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
    """Rows of a group, by case and variant."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.group == group:
            cases.setdefault(row.case, {})[row.variant] = row
    return cases


def ratios(
    rows: Sequence[Row],
    group: str,
    variant: str,
    base: Sequence[str] = ("stock",),
    only: Callable[[Row], bool] = lambda _: True,
) -> list[float]:
    """The variant's time over the best of ``base``, for each case of a group that has both."""
    return [
        case[variant].ms / min(case[name].ms for name in base if name in case)
        for case in _by_case(rows, group).values()
        if variant in case and base[0] in case and only(case[variant])
    ]


def _extra(rows: Sequence[Row], group: str) -> list[float]:
    return [
        case["on"].mb - case["stock"].mb
        for case in _by_case(rows, group).values()
        if {"on", "stock"} <= case.keys()
    ]


def mean(values: Sequence[float]) -> float | None:
    """The geometric mean; none of nothing."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def worst(values: Sequence[float]) -> float | None:
    """The largest; none of nothing."""
    return max(values, default=None)


_MAIN = (64, 128)  # head dims that the goals of most figures are of


def _goals_of_others(rows: Sequence[Row]) -> list[Goal]:
    """Those of other head dims, where they were measured."""
    others = [row for row in rows if row.head_dim not in _MAIN]
    if not others:
        return []
    dims = ", ".join(map(str, sorted({row.head_dim for row in others})))
    return [
        Goal(f"head dims {dims}, {group}{beside}: the worst", worst(ratios(others, group, "on")), goal, "×")
        for group, beside, goal in (
            ("prefill", ", default split_size", 1.05),
            ("backward", ", against stock's deterministic=True", 1.0),
        )
    ]


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The figures that deterministic mode is held to, against stock of the same pin."""
    return [*_goals_of_main([row for row in rows if row.head_dim in _MAIN]), *_goals_of_others(rows)]


def _goals_of_main(rows: Sequence[Row]) -> list[Goal]:
    prefill, decode, backward = (ratios(rows, group, "on") for group in ("prefill", "decode", "backward"))
    one_chunk = ratios(rows, "prefill", "on 2048", only=lambda row: row.len_k <= 2048)
    chunked = ratios(rows, "chunked", "on", ("stock", "stock, one split"))
    against_one = [
        1 / r
        for r in ratios(
            rows,
            "decode",
            "on",
            ("stock, one split",),
            lambda row: (row.batch, row.len_k) == (1, 131072),
        )
    ]
    million = ratios(rows, "million keys", "on")
    return [
        Goal("prefill, default split_size: geometric mean", mean(prefill), 1.05, "×"),
        Goal("prefill, default split_size: the worst", worst(prefill), 1.10, "×"),
        Goal("prefill, keys within one chunk: the worst", worst(one_chunk), 1.01, "×"),
        Goal("prefill: memory above stock's, the most", worst(_extra(rows, "prefill")), 1, "MiB"),
        Goal("prefill, split_size 512: geometric mean", mean(ratios(rows, "prefill", "on 512")), 1.15, "×"),
        Goal("512 new tokens on 16 k and 128 k, against stock's best: the worst", worst(chunked), 1.05, "×"),
        Goal("decode, default split_size: geometric mean", mean(decode), 1.0, "×"),
        Goal("decode, default split_size: the worst", worst(decode), 1.10, "×"),
        Goal(
            "decode, batch 1 and 128 k keys: times faster than one split",
            min(against_one, default=None),
            15,
            "×",
            at_least=True,
        ),
        Goal("backward, against stock's deterministic=True: the worst", worst(backward), 1.10, "×"),
        Goal("backward: memory above stock's, the most", worst(_extra(rows, "backward")), 1, "MiB"),
        Goal("512 queries on 2**20 keys, default split_size: the worst", worst(million), 1.05, "×"),
        Goal(
            "mode off, against stock, prefill: geometric mean",
            mean(ratios(rows, "prefill", "off")),
            1.01,
            "×",
        ),
    ]

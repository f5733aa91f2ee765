"""How long the series' commands take, beside ``git am`` on the same series and base."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import export, ground, lint, tree
from scripts.series.upstream import forecast

if TYPE_CHECKING:
    from collections.abc import Callable

    from scripts.series.model import Series
    from scripts.source import upstream
    from scripts.source.matrix_tables import Upstream
    from scripts.source.releases import Release

REPEATS = 3


@dataclass(frozen=True)
class Timing:
    """The median of some runs; None where the program is not installed."""

    what: str
    seconds: float | None


def _median(
    function: Callable[[Path], object], build: Path, prepare: Callable[[Path], object] | None = None
) -> float:
    times = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory(dir=build, prefix="timings-") as folder:
            if prepare:
                prepare(Path(folder))
            started = time.monotonic()
            function(Path(folder))
            times.append(time.monotonic() - started)
    return statistics.median(times)


def measure(
    series: Series, pin: Upstream, checkout: upstream.Checkout, release: Release, build: Path
) -> list[Timing]:
    """Time each, from files on disk: sdists are fetched before."""
    build.mkdir(parents=True, exist_ok=True)
    paths = [str(series.folder.resolve() / p.name) for p in series.patches]

    def base(folder: Path) -> None:
        ground.make_base(folder / "source", pin, checkout, series.own)

    def applied(folder: Path) -> None:
        tree.apply(series, pin, checkout, folder / "source")

    def mail(folder: Path) -> None:
        Repository(folder / "source", SeriesError).run("am", "--quiet", *paths)

    return [
        Timing("apply: upstream's files, exactness, commits", _median(applied, build)),
        Timing("apply again: nothing changed", _median(applied, build, applied)),
        Timing("git am, on a base that is there", _median(mail, build, base)),
        Timing(
            "export --check",
            _median(
                lambda folder: export.export(folder / "source", series.folder, series.own.folder, check=True),
                build,
                applied,
            ),
        ),
        Timing("lint", _median(lambda _: lint.check(series.folder), build)),
        Timing(
            f"forecast for {release.name}",
            _median(lambda folder: forecast.run_forecast(folder, series, pin, checkout, release), build),
        ),
    ]

"""``forecast``: what becomes of each patch on other releases of upstream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from rich.table import Table

from scripts.base import console, layout
from scripts.base.errors import UpstreamError, UsageError
from scripts.base.git import Repository
from scripts.commands import arguments
from scripts.series import clone, model, places
from scripts.series.upstream import forecast, move
from scripts.series.upstream import words as upstream_words
from scripts.source import releases, upstream

if TYPE_CHECKING:
    import argparse

    from scripts.series.upstream.forecast import Forecast
    from scripts.source.matrix import Matrix


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    listed = "; ".join(f"{outcome.value} ({outcome.meaning})" for outcome in move.Outcome)
    outcomes = (
        f"Changes nothing. Outcomes: {listed}. It also tells what upstream added, dropped and changed "
        "where no merge would show it: kernel files, setup.py, parameters, functions that patches rely on."
    )
    parser = arguments.series_parser(
        commands, "forecast", outcomes, otherwise="every one; with VERSION the first"
    )
    parser.add_argument(
        "versions",
        metavar="VERSION",
        nargs="*",
        help="a release, tag, commit or 'latest' (default: the releases that wheel_matrix.toml lists)",
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table (not with --json)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.markdown and options.json:
        raise UsageError("--markdown and --json: choose one.")
    # Releases that are named are the first's unless --upstream says otherwise.
    every = (arguments.chosen(options),) if options.versions else arguments.every_chosen(options)
    forecasts = [_forecast(loaded, options) for loaded in every]
    if options.json:
        console.result({one.name: one.as_data() for one in forecasts})
        return
    for one in forecasts:
        if options.markdown:
            console.out.print(_markdown(one), markup=False)
        else:
            _show(one)


@dataclass(frozen=True)
class _Forecast:
    """What becomes of one series on each release."""

    loaded: Matrix
    patches: model.Series
    found: dict[str, Forecast]
    asked: dict[str, str]  # what a user called each release

    @property
    def name(self) -> str:
        """The upstream's."""
        return self.loaded.name

    def as_data(self) -> dict[str, Any]:
        by_release = {
            n: [{"patch": m.patch, "outcome": m.outcome.value, "evidence": m.evidence} for m in one.moves]
            for n, one in self.found.items()
        }
        changes = {n: one.upstream.model_dump(mode="json") for n, one in self.found.items()}
        return {"from": self.loaded.upstream.version, "releases": by_release, "upstream": changes}

    def rows(self) -> dict[str, list[str]]:
        """The cells of a table: a row a patch, by its outcomes, then what upstream changed."""
        rows = {
            f"{p.number} {p.subject}": [one.moves[i].outcome.value for one in self.found.values()]
            for i, p in enumerate(self.patches.patches)
        }
        for one in self.found.values():
            for row, cell in upstream_words.rows(one.upstream, self.loaded.upstream.package).items():
                rows.setdefault(row, []).append(cell)
        return rows

    def what_next(self) -> str:
        """What a maintainer does after this: a rebase to the newest release tried, if it is newer."""
        place = places.of(self.loaded).source
        newer = [name for name in self.found if Version(name) > Version(self.loaded.upstream.version)]
        if newer:
            return places.command("rebase", place, self.asked[max(newer, key=Version)])
        if releases.LATEST in self.asked.values():
            return "nothing; no release is newer than the one that the series stands on"
        return places.command("forecast", place, releases.LATEST)


def _forecast(loaded: Matrix, options: argparse.Namespace) -> _Forecast:
    patches = clone.series(loaded)
    checkout = upstream.pinned(loaded.upstream, options.source)
    asked = options.versions or list(loaded.releases)
    git = Repository(layout.UPSTREAM, UpstreamError)
    has_git = git.is_top_level()
    found: dict[str, Forecast] = {}
    to_try = {  # 'latest' may be one that was named
        release.name: (release, name)
        for name in asked
        for release in [releases.find(loaded, name, layout.UPSTREAM, layout.cache("sdist"), options.source)]
    }
    for release, _ in to_try.values():
        console.step(f"Forecast for {loaded.name} {release.name} ({release.how})")
        found[release.name] = forecast.run_forecast(
            layout.BUILD / "tmp", patches, loaded.upstream, checkout, release, git if has_git else None
        )
    return _Forecast(loaded, patches, found, {name: word for name, (_, word) in to_try.items()})


def _show(told: _Forecast) -> None:
    """A table of outcomes, then of what upstream changed; then the details of both."""
    table = Table(f"patch of {told.name}", *told.found)
    for number, (name, cells) in enumerate(told.rows().items(), 1):
        table.add_row(name, *cells, end_section=number == len(told.patches.patches))
    console.out.print(table)
    for name, one in told.found.items():
        for m in one.moves:
            for line in move.summary(m.evidence):
                console.note(f"{name}, {m.patch.removesuffix('.patch')}: {line}")
        names, package = [p.name for p in told.patches.patches], told.loaded.upstream.package
        if lines := upstream_words.lines(one.upstream, names, package):
            console.step(f"What upstream changed in {name}, whether a patch conflicts or not")
            for line in lines:
                console.note(line)
    console.note(f"next: {told.what_next()}")


def _markdown(told: _Forecast) -> str:
    lines = ["| patch | " + " | ".join(told.found) + " |", "|---" * (len(told.found) + 1) + "|"]
    evidence = [
        ["".join(f"<br>{line}" for line in one.moves[i].evidence) for one in told.found.values()]
        for i in range(len(told.patches.patches))
    ]
    for i, (name, cells) in enumerate(told.rows().items()):
        more = evidence[i] if i < len(evidence) else [""] * len(cells)
        lines.append(f"| {name} | " + " | ".join(a + b for a, b in zip(cells, more, strict=True)) + " |")
    return "\n".join(lines)

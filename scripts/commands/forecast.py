"""``forecast``: what becomes of each patch on other releases of upstream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts.base import console, layout
from scripts.base.errors import UpstreamError, UsageError
from scripts.base.git import Repository
from scripts.commands import arguments
from scripts.series import forecast, model, move, places
from scripts.source import releases, upstream

if TYPE_CHECKING:
    import argparse

    from scripts.series.move import Move
    from scripts.source.matrix import Matrix


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    listed = "; ".join(f"{outcome.value} ({outcome.meaning})" for outcome in move.Outcome)
    outcomes = f"Changes nothing. Outcomes: {listed}."
    parser = arguments.series_parser(commands, "forecast", outcomes)
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
            console.out.print(_markdown(one.patches, one.moves), markup=False)
        else:
            _show(one)


@dataclass(frozen=True)
class _Forecast:
    """What becomes of one series: its patches' moves by release."""

    name: str
    version: str
    patches: model.Series
    moves: dict[str, list[Move]]

    def as_data(self) -> dict[str, Any]:
        by_release = {
            n: [{"patch": m.patch, "outcome": m.outcome.value, "evidence": m.evidence} for m in moves]
            for n, moves in self.moves.items()
        }
        return {"from": self.version, "releases": by_release}


def _forecast(loaded: Matrix, options: argparse.Namespace) -> _Forecast:
    patches = model.read(places.of(loaded).patches)
    checkout = upstream.pinned(loaded.upstream, options.source)
    asked = options.versions or list(loaded.releases)
    git = Repository(layout.UPSTREAM, UpstreamError)
    has_git = git.is_top_level()
    moves_by_release: dict[str, list[Move]] = {}
    to_try = [
        releases.find(loaded, name, layout.UPSTREAM, layout.cache("sdist"), options.source) for name in asked
    ]
    for release in {r.name: r for r in to_try}.values():  # 'latest' may be one that was named
        console.step(f"Forecast for {loaded.name} {release.name} ({release.how})")
        moves_by_release[release.name] = forecast.run_forecast(
            layout.BUILD / "tmp", patches, loaded.upstream, checkout, release, git if has_git else None
        )
    return _Forecast(loaded.name, loaded.upstream.version, patches, moves_by_release)


def _show(told: _Forecast) -> None:
    table = Table(f"patch of {told.name}", *told.moves)
    for i, p in enumerate(told.patches.patches):
        table.add_row(f"{p.number} {p.subject}", *(moves[i].outcome.value for moves in told.moves.values()))
    console.out.print(table)
    for name, moves in told.moves.items():
        for m in moves:
            for line in move.summary(m.evidence):
                console.note(f"{name}, {m.patch.removesuffix('.patch')}: {line}")


def _markdown(patches: model.Series, moves_by_release: dict[str, list[Move]]) -> str:
    lines = ["| patch | " + " | ".join(moves_by_release) + " |", "|---" * (len(moves_by_release) + 1) + "|"]
    for i, p in enumerate(patches.patches):
        cells = [
            moves[i].outcome.value + "".join(f"<br>{line}" for line in moves[i].evidence)
            for moves in moves_by_release.values()
        ]
        lines.append(f"| {p.number} {p.subject} | " + " | ".join(cells) + " |")
    return "\n".join(lines)

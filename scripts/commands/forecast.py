"""``forecast``: what becomes of each patch on other releases of upstream."""

from __future__ import annotations

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


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    listed = "; ".join(f"{outcome.value} ({outcome.meaning})" for outcome in move.Outcome)
    outcomes = f"Changes nothing. Outcomes: {listed}."
    parser = arguments.series_parser(commands, "forecast", outcomes)
    parser.add_argument(
        "versions",
        metavar="VERSION",
        nargs="*",
        help="a release, tag, commit or 'latest' (default: [releases] of wheel_matrix.toml)",
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table (not with --json)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.markdown and options.json:
        raise UsageError("--markdown and --json: choose one.")
    loaded = arguments.chosen(options)
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
        console.step(f"Forecast for {release.name} ({release.how})")
        moves_by_release[release.name] = forecast.run_forecast(
            layout.BUILD / "tmp", patches, loaded.upstream, checkout, release, git if has_git else None
        )
    if options.json:
        as_data = {
            n: [{"patch": m.patch, "outcome": m.outcome.value, "evidence": m.evidence} for m in moves]
            for n, moves in moves_by_release.items()
        }
        console.result({"from": loaded.upstream.version, "releases": as_data})
    elif options.markdown:
        console.out.print(_markdown(patches, moves_by_release), markup=False)
    else:
        table = Table("patch", *moves_by_release)
        for i, p in enumerate(patches.patches):
            table.add_row(
                f"{p.number} {p.subject}", *(moves[i].outcome.value for moves in moves_by_release.values())
            )
        console.out.print(table)
        for name, moves in moves_by_release.items():
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

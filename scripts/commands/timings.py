"""``timings``: the series' commands beside git am."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from rich.table import Table

from scripts.base import console, layout
from scripts.commands import arguments
from scripts.lab import series_times
from scripts.series import clone
from scripts.source import releases, upstream

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    arguments.series_parser(commands, "timings").set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    loaded = arguments.chosen(options)
    patches = clone.series(loaded)
    checkout = upstream.pinned(loaded.upstream, options.source)
    newest = max((v for v in loaded.releases if v != loaded.upstream.version), key=Version)
    release = releases.find(loaded, newest, layout.UPSTREAM, layout.cache("sdist"), options.source)
    measured = series_times.measure(patches, loaded.upstream, checkout, release, layout.BUILD / "tmp")
    if options.json:
        console.result([asdict(m) for m in measured])
        return
    table = Table("what", "seconds, median of 3")
    for m in measured:
        table.add_row(m.what, "not installed" if m.seconds is None else f"{m.seconds:.2f}")
    console.out.print(table)

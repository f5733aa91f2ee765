"""Where an upstream's series lies in a clone: its patches, own files, work tree, and rebase."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - the doctest uses it
from typing import TYPE_CHECKING

from scripts.base import layout

if TYPE_CHECKING:
    from scripts.source.matrix import Matrix


@dataclass(frozen=True)
class Places:
    """The folders of one series."""

    patches: Path
    own: Path | None  # our own files
    source: Path
    rebase: Path


def of(loaded: Matrix) -> Places:
    """The folders of an upstream's series; those of the first have no name of an upstream in theirs."""
    end = "" if loaded.is_first else f"-{loaded.name}"
    return Places(
        layout.ROOT / loaded.table.series,
        layout.ROOT / loaded.table.own if loaded.table.own else None,
        layout.SOURCE.with_name(layout.SOURCE.name + end),
        layout.BUILD / f"rebase{end}",
    )


def command(name: str, source: Path, *options: str) -> str:
    """A command for the series whose work tree this is, as a user types it.

    >>> command("apply", Path("build/source-flash-attn-4"), "--reset")
    'nox -s apply -- --upstream flash-attn-4 --reset'
    >>> command("export", Path("build/source"))
    'nox -s export'
    """
    _, other, upstream = source.name.partition(f"{layout.SOURCE.name}-")
    words = (*(("--upstream", upstream) if other else ()), *options)
    return " ".join((f"nox -s {name}", *(("--", *words) if words else ())))

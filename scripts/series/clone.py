"""A series in this clone: apply it to its work tree, or look at it. Tells what is done."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console, files, layout
from scripts.series import model, places, tree
from scripts.series.rebase import state as rebase_state
from scripts.source import upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.source import matrix


def series(loaded: matrix.Matrix) -> model.Series:
    """An upstream's patches and our own files, as they lie in this clone."""
    place = places.of(loaded)
    return model.read(place.patches, place.own)


def apply(
    loaded: matrix.Matrix,
    source: upstream.Source,
    root: Path | None = None,
    *,
    count: int | None = None,
    only: str | None = None,
    reset: bool = False,
) -> tuple[model.Series, tree.Tree]:
    """Apply an upstream's series, or its first patches, or one alone, telling what is done."""
    place = places.of(loaded)
    whole = series(loaded)
    patches = whole.only(only) if only else whole if count is None else whole.upto(count)
    checkout = upstream.pinned(loaded.upstream, source)
    part = f"{only}, of " if only else "" if patches == whole else f"the first {len(patches.patches)} of "
    console.step(f"Patches: {part}{len(whole.patches)}")
    if rebase_state.under_way(place.rebase):
        console.warn(
            f"a rebase is under way in build/{place.rebase.name} (nox -s rebase -- --continue, or --abort)."
        )
    with files.in_turn(layout.BUILD / files.SERIES_LOCK, "is working on the series"):
        applied = tree.apply(
            patches, loaded.upstream, checkout, root or place.source, of=len(whole.patches), reset=reset
        )
    console.note(f"commit {applied.commit}, digest {applied.digest[:16]}…, in {applied.root}")
    return patches, applied


def standing(loaded: matrix.Matrix) -> tree.Tree | None:
    """The work tree of an upstream's series, where it is the series as patches/ has it."""
    place = places.of(loaded)
    return tree.reusable(series(loaded), loaded.upstream, place.source)


@contextmanager
def view(loaded: matrix.Matrix, source: upstream.Source) -> Iterator[tuple[model.Series, tree.Tree]]:
    """The series as commits, to look at; nobody's work is touched.

    It is its own work tree where that is just the series, else a tree that goes again.
    """
    patches = series(loaded)
    if (there := standing(loaded)) is not None:
        yield patches, there
        return
    checkout = upstream.pinned(loaded.upstream, source)
    (layout.BUILD / "tmp").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=layout.BUILD / "tmp", prefix="view-") as folder:
        yield patches, tree.apply(patches, loaded.upstream, checkout, Path(folder) / "source")

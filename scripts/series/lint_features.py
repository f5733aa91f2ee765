"""Rules of the table of features: each of our own files in one, and patches that name one of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from scripts.base import layout
from scripts.base.errors import SeriesError
from scripts.series import features, guards
from scripts.series.problem import Problem, as_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.series.features import Features
    from scripts.series.model import Series
    from scripts.series.own import OwnFiles


def check(own: OwnFiles, series: Series) -> list[Problem]:
    """What is wrong between our own files, the table of their features, and the patches of a series.

    An upstream without files of ours has no table, and its patches name what features they like.
    """
    if own.folder is None or not own.contents:
        return []
    table = features.table_of(own.folder)
    try:
        told = features.read(own.folder)
    except SeriesError as e:
        return [as_problem(table, SeriesError(line)) for line in str(e).splitlines()]
    if told is None:
        return [Problem(table, 1, "is missing; it says which feature each of our own files belongs to.")]
    return [*_files(own, told), *_patches(series, told), *_entries(own, series, told)]


def _files(own: OwnFiles, told: Features) -> Iterator[Problem]:
    """Each file belongs to one feature."""
    for path in own.contents:
        names = told.of(path)
        if not names:
            yield Problem(own.place(path), 1, f"belongs to no feature; name it in one of {_short(told)}.")
        elif len(names) > 1:
            yield Problem(
                own.place(path), 1, f"belongs to {' and '.join(names)} in {_short(told)}; leave it to one."
            )


def _patches(series: Series, told: Features) -> Iterator[Problem]:
    """Patches name features that there are."""
    for patch in series.patches:
        if patch.feature not in told.entries:
            lines = patch.content.decode().split("\n")
            at = next(i for i, line in enumerate(lines, 1) if line.startswith("Feature:"))
            text = f"Feature {patch.feature!r} is none of {_short(told)}: {', '.join(told.entries)}."
            yield Problem(series.folder / patch.name, at, text)


def _entries(own: OwnFiles, series: Series, told: Features) -> Iterator[Problem]:
    """What the table names is there."""
    used = {patch.feature for patch in series.patches}
    for name, feature in told.entries.items():
        if not feature.files and name not in used:
            yield Problem(told.path, told.line(name), f"{name} has no file, and no patch names it; drop it.")
        for pattern in feature.files:
            if not any(features.fits(path, pattern) for path in own.contents):
                at = told.line(name, "files", pattern)
                yield Problem(told.path, at, f"{name}: no file of ours is {pattern}; drop it.")
        for test in feature.tests:
            if not (layout.ROOT / test).exists():
                at = told.line(name, "tests", test)
                yield Problem(told.path, at, f"{name}: there is no {test}; name a test of this repository.")
        for test in feature.holds:
            try:
                guards.parse(f"test {test}")
            except ValueError as e:
                at = told.line(name, "holds", test)
                yield Problem(
                    told.path, at, f"{name}: holds {test!r}: {re.sub(' none of .*', ' no test', str(e))}."
                )


def _short(told: Features) -> str:
    return f"{told.path.parent.name}/{told.path.name}"

"""Render CHANGES.md: each feature with its files and patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import SeriesError
from scripts.series import features, model
from scripts.series.features import Feature

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from scripts.series.model import Patch, Series
    from scripts.source.matrix import Matrix

_TOP = """# Changes

What this fork's wheels differ in from upstream's releases, by feature: its own files, and its patches, most
of which are hooks that call them. Rendered by `nox -s changes` from the tables `fork/NAME.toml` and the
messages in `patches/`; edit those. A figure with a command is reproduced by it; one of a form that a patch
no longer has tells why it has another.
"""
_HEAD = """
## {distribution} {version}

{repository}, {what}. {where}

| feature | what it is | patches | files |
|---|---|---|---|
"""


def render(matrix: Matrix, root: Path) -> str:
    """The whole text of CHANGES.md, of the series that lie in a repository."""
    return "".join((_TOP, *(_part(one, root) for one in matrix.each())))


def _part(matrix: Matrix, root: Path) -> str:
    """What the text says of one upstream."""
    pin, table = matrix.upstream, matrix.table
    own = root / table.own if table.own else None
    series = model.read(root / table.series, own)
    commit = f"commit {pin.commit}"
    what = f"tag {pin.tag}, {commit}" if pin.tag is not None else f"{commit}, which is no release"
    places = f"Its files lie in `{table.own}`, its patches" if table.own else "Its patches lie"
    text = _HEAD.format(**vars(pin), what=what, where=f"{places} in `{table.series}`.")
    told = features.read(own)
    entries = _entries(series, told)
    for name, feature in entries.items():
        of_it, paths = _of(series, name), told.files(name, series.own.contents) if told else ()
        cells = (name, feature.title, *(len(counted) or "–" for counted in (of_it, paths)))
        text += f"| {' | '.join(map(str, cells))} |\n"
    for name, feature in entries.items():
        text += "".join(f"\n{part}\n" for part in _told(name, feature, _of(series, name)))
    return text


def _entries(series: Series, told: features.Features | None) -> dict[str, Feature]:
    """The features of the table, and those that patches name alone."""
    entries = dict(told.entries) if told else {}
    for patch in series.patches:
        entries.setdefault(patch.feature, Feature(title=""))
    return entries


def _of(series: Series, name: str) -> list[Patch]:
    return [patch for patch in series.patches if patch.feature == name]


def _told(name: str, feature: Feature, patches: Sequence[Patch]) -> Iterator[str]:
    """The paragraphs about a feature."""
    yield f"### {name}"
    if feature.title:
        yield f"{feature.title}."
    yield from (words.strip() for words in (feature.text, feature.figures) if words)
    for title, paths in (("Proved by", feature.tests), ("Files:", feature.files)):
        if paths:
            yield f"{title} {', '.join(f'`{path}`' for path in paths)}."
    for patch in patches:
        yield f"#### {patch.subject}"
        yield patch.body
        touched = ", ".join(f"`{change.path}`" for change in patch.files)
        yield f"Upstream: {patch.upstream_status}. In {touched}."


def write(path: Path, text: str) -> bool:
    """Replace the file when its text differs; whether it did."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    files.write(path, text)
    return True


def check(path: Path, text: str) -> None:
    """Raise a SeriesError when the file is not what would be written."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        raise SeriesError(
            f"{path.name} is stale: it is not what fork/NAME.toml and the patches say. "
            "Run nox -s changes and commit the result."
        )

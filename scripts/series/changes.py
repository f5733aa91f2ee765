"""Render CHANGES.md from the patches' own headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import SeriesError
from scripts.series import model

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.series.model import Series
    from scripts.source.matrix import Matrix

_TOP = """# Changes

What this fork's wheels differ in from upstream's releases, patch by patch and in the order of each
series. Rendered from the messages in `patches/` by `nox -s changes`; edit those. A figure with a command is
reproduced by it; one of a form that a patch no longer has tells why it has another.
"""
_HEAD = """
## {distribution} {version}

{repository}, {what}. The series is `{series}`.

| | patch | feature | upstream status | files |
|---|---|---|---|---|
"""


def render(matrix: Matrix, root: Path) -> str:
    """The whole text of CHANGES.md, of the series that lie in a repository."""
    parts = [_part(one, model.read(root / one.table.series)) for one in matrix.each()]
    return "".join((_TOP, *parts))


def _part(matrix: Matrix, series: Series) -> str:
    """What the text says of one upstream."""
    pin = matrix.upstream
    commit = f"commit {pin.commit}"
    what = f"tag {pin.tag}, {commit}" if pin.tag is not None else f"{commit}, which is no release"
    text = _HEAD.format(**vars(pin), what=what, series=matrix.table.series)
    for patch in series.patches:
        cells = (patch.number, patch.subject, patch.feature, patch.upstream_status, len(patch.files))
        text += f"| {' | '.join(map(str, cells))} |\n"
    for patch in series.patches:
        touched = ", ".join(f"`{change.path}`" for change in patch.files)
        text += f"\n### {patch.subject}\n\n{patch.body}\n\n"
        text += f"Feature: {patch.feature}. Upstream: {patch.upstream_status}. Files: {touched}.\n"
    return text


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
            f"{path.name} is stale: it is not what the patches say. Run nox -s changes and commit the result."
        )

"""Render CHANGES.md from the patches' own headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import SeriesError

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.series.model import Series
    from scripts.source.matrix import Matrix

_HEAD = """# Changes to flash-attention {version}

What this fork's wheels differ in from upstream's release {version} ({repository}, tag {tag},
commit {commit}), patch by patch and in the order of the series. Rendered from the
messages in `patches/` by `nox -s changes`; edit those. A figure with a command is reproduced by it; \
one of a form
that a patch no longer has tells why it has another.

| patch | feature | upstream status | files |
|---|---|---|---|
"""


def render(matrix: Matrix, series: Series) -> str:
    """The whole text of CHANGES.md."""
    pin = matrix.upstream
    text = _HEAD.format(version=pin.version, repository=pin.repository, tag=pin.tag, commit=pin.commit)
    for patch in series.patches:
        cells = (f"{patch.name[:4]} {patch.subject}", patch.feature, patch.upstream_status, len(patch.files))
        text += f"| {' | '.join(map(str, cells))} |\n"
    for patch in series.patches:
        touched = ", ".join(f"`{change.path}`" for change in patch.files)
        text += f"\n## {patch.name[:4]} {patch.subject}\n\n{patch.body}\n\n"
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

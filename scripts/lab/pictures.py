"""Make pictures with matplotlib, which is installed for that alone; the same figures give the same file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.base.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure


def figure(width: float, height: float) -> Figure:
    """An empty picture, in inches.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - needed for this alone
    except ImportError as e:
        raise UsageError(
            "--picture needs matplotlib: pip install matplotlib, or nox -s bench, which installs it."
        ) from e
    return Figure(figsize=(width, height), layout="constrained")


def save(picture: Figure, path: Path) -> None:
    """Write a picture aside, then rename it; its kind is the name's suffix."""
    import matplotlib as mpl  # noqa: PLC0415

    part = path.with_name(f".{path.name}")
    kind = path.suffix.removeprefix(".")
    try:
        with mpl.rc_context({"svg.hashsalt": path.name}):
            picture.savefig(part, format=kind, metadata={"Date": None} if kind == "svg" else None)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

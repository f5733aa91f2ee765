"""Bounds of windows: a negative one is no limit on its side, as in every other function of this project."""

__all__ = ["Side", "sides"]

Side = int | None


def sides(left: Side, right: Side) -> tuple[Side, Side]:
    """A window's bounds, with None where there is no limit."""
    return (
        None if left is None or left < 0 else left,
        None if right is None or right < 0 else right,
    )

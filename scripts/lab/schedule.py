"""Which worker compiles what, when the longest file that waits goes to the first that is free."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Placed:
    """One file of a plan."""

    slot: int
    file: int  # its place in what was asked for
    start: float
    end: float


def planned(seconds: Sequence[float], slots: int) -> list[Placed]:
    """The files in the order in which they start.

    >>> [(p.slot, p.file, p.end) for p in planned([10, 30, 20], 2)]
    [(0, 1, 30.0), (1, 2, 20.0), (1, 0, 30.0)]
    """
    free = [(0.0, slot) for slot in range(slots)]
    plan = []
    for file in sorted(range(len(seconds)), key=lambda at: (-seconds[at], at)):
        start, slot = heapq.heappop(free)
        end = start + float(seconds[file])
        heapq.heappush(free, (end, slot))
        plan.append(Placed(slot, file, start, end))
    return plan


def length(plan: Iterable[Placed]) -> float:
    """When the last file is done.

    >>> length(planned([10, 30, 20], 1))
    60.0
    """
    return max((placed.end for placed in plan), default=0.0)

"""How long the kernel files take on many workers, from what each was measured to take.

The longest file that waits goes to the worker that is free first, as builds do it (``cluster/dispatch``).
Network and scheduler are left out: an object has a few hundred kilobytes, a file takes minutes.
"""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.base.errors import UsageError
from scripts.lab import pictures
from scripts.wheels.compiling import kernels

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from scripts.source.kernel_set import Kernel

WORKERS = tuple(2**n for n in range(9))  # with one compiler at once each: 1 to 256
# CPU seconds that every part of a divided file would take again: the headers, with nothing instantiated.
# Seen with nvcc 13.0: 7.9 for those of the forward pass, 7.5 for those of the backward.
_HEADERS = 8.0


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


@dataclass(frozen=True)
class Case:
    """One way to cut the work."""

    what: str
    seconds: tuple[float, ...]  # of each file

    @property
    def total(self) -> float:
        """On one worker."""
        return sum(self.seconds)

    def length(self, workers: int) -> float:
        """On this many."""
        return length(planned(self.seconds, workers))

    def speedup(self, workers: int, alone: float) -> float:
        """How often faster than one worker with the files as they are, which takes ``alone`` seconds."""
        return alone / self.length(workers)

    @property
    def enough(self) -> int:
        """The fewest workers on which it takes as long as on any number: as the longest file."""
        longest = max(self.seconds)
        return next(n for n in range(1, len(self.seconds) + 1) if self.length(n) <= longest)


def divided(seconds: Sequence[float], limit: float) -> tuple[float, ...]:
    """Files of which each that takes longer than ``limit`` is cut into as few parts as keep to it.

    >>> divided([100, 30], 60)
    (54.0, 54.0, 30.0)
    """
    parts: list[float] = []
    for one in seconds:
        count = max(1, math.ceil((one - _HEADERS) / (limit - _HEADERS)))
        parts += [_HEADERS + (one - _HEADERS) / count if count > 1 else float(one)] * count
    return tuple(parts)


def cases(seconds: Sequence[float], releases: int) -> list[Case]:
    """The files as they are, with the longest cut, and those of all CUDA releases of the matrix."""
    longest, count = max(seconds), len(seconds)
    found = [Case(f"{count} files", tuple(seconds))]
    for parts in (2, 4):
        limit = _HEADERS + (longest - _HEADERS) / parts
        cut = divided(seconds, limit)
        found.append(Case(f"none longer than {limit:.0f} s: {len(cut)} files", cut))
    return [*found, Case(f"{releases} CUDA releases: {releases * count} files", tuple(seconds) * releases)]


def expected(chosen: Sequence[Kernel], architectures: Sequence[str]) -> list[float]:
    """What files take by the figures that builds go by (``_SECONDS`` in ``wheels/compiling/kernels``)."""
    return [kernels.seconds_expected(kernel, architectures, {}) for kernel in chosen]


def logged(path: Path) -> list[float]:
    """What kernel files took by ninja's log of a build, ``build/ninja/…/.ninja_log``: seconds of the clock.

    Raises:
        UsageError: it is none, or has no kernel file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--from {path}: {e}.") from e
    rows = [re.match(r"(\d+)\t(\d+)\t\d+\t(\S+/kernels/\S+\.o)\t", line) for line in lines]
    taken = {row[3]: (int(row[2]) - int(row[1])) / 1000 for row in rows if row}
    if not (lines and lines[0].startswith("# ninja log")) or not taken:
        raise UsageError(f"--from {path}: not a log of ninja's with kernel files (build/ninja/*/.ninja_log).")
    return [*taken.values()]


def draw(shown: Sequence[Case], path: Path) -> None:
    """Speed-up over workers, as a picture.

    Raises:
        UsageError: matplotlib is not installed.
    """
    picture = pictures.figure(8, 4.5)
    axes = picture.subplots()
    axes.plot(WORKERS, WORKERS, linestyle=":", color="grey", label="as many times as workers")
    for case in shown:
        alone = case.total if case is shown[-1] else shown[0].total
        axes.plot(WORKERS, [case.speedup(n, alone) for n in WORKERS], marker="o", label=case.what)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(WORKERS, [str(n) for n in WORKERS])
    ticks = [2**n for n in range(8)]
    axes.set_yticks(ticks, [f"{n} ×" for n in ticks])
    axes.set_ylim(1, 180)
    axes.set_xlabel("workers, one compiler each")
    axes.set_title(
        f"Kernel files on many workers (simulated; the longest takes {max(shown[0].seconds):.0f} s)"
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    pictures.save(picture, path)

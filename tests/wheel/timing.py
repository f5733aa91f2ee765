"""Times of calls that alternate in one process."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

CALLS = 20  # of a warm call in a row, which the GPU does not keep waiting
FEWEST = 5  # times that a call is measured at least
BUSY = 2_000_000  # cycles, a millisecond: longer than a call takes to be on its way


@dataclass(frozen=True)
class Call:
    """What is measured, and what surrounds it, which is not."""

    run: Callable[[], list[torch.Tensor]]
    scope: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def measure(calls: dict[str, Call], seconds: float = 0.6) -> dict[str, dict[str, float]]:
    """Alternate the calls until each has had its share.

    Returns:
        By name: ``ms``, the GPU's milliseconds (median), for which it is kept busy until the call is on its way; ``host_ms``,
        what the caller's thread spends on the call (median); ``mb``, MiB of memory at most above the inputs.
    """
    results: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        with call.scope():
            call.run()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            call.run()
            torch.cuda.synchronize()
            results[name] = {"mb": (torch.cuda.max_memory_allocated() - base) / 2**20}
    times: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    total = 0.0
    while total < seconds * 1000 * len(calls) or len(times[next(iter(calls))]) < FEWEST:
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with call.scope():
                torch.cuda._sleep(BUSY)
                start.record()
                began = time.perf_counter()
                call.run()
                host[name].append(1000 * (time.perf_counter() - began))
                stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
            total += times[name][-1]
        if len(times[name]) >= 200:
            break
    for name, values in times.items():
        results[name] |= {"ms": statistics.median(values), "host_ms": statistics.median(host[name])}
    return results


def host_microseconds(call: Callable[[], object], repeats: int) -> float:
    """What a warm call keeps the caller's thread: the least, for a host that does other things too only adds to it."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - began) / CALLS * 1e6)
    return min(times)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def write(path: Path, facts: object) -> None:
    """Write figures as JSON: aside, then renamed."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)

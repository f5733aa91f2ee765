"""Where compiles and proofs go that are not for this machine alone: a Dask scheduler and its workers.

Dask is imported when one is asked for, and not before: a build without needs none.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from scripts.base import console
from scripts.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_jobqueue import SLURMCluster
    from distributed import Client

_FORMS = "tcp://HOST:PORT or another address of a Dask scheduler, local, local:WORKERS, or slurm:JOBS"
_PATIENCE = 30  # seconds until a scheduler answers, which an idle one does in one; a wrong address takes all


class Kind(Enum):
    """What a scheduler is."""

    ADDRESS = "address"  # one that runs already
    LOCAL = "local"  # workers in this process
    SLURM = "slurm"  # workers in jobs of Slurm, which dask-jobqueue asks for


@dataclass(frozen=True)
class Scheduler:
    """Which scheduler is meant."""

    kind: Kind
    address: str = ""
    count: int = 1  # of workers that are started


def parse(text: str) -> Scheduler:
    """What ``--scheduler`` names.

    >>> parse("tcp://head:8786")
    Scheduler(kind=<Kind.ADDRESS: 'address'>, address='tcp://head:8786', count=1)
    >>> parse("local:2").count, parse("slurm:8").kind
    (2, <Kind.SLURM: 'slurm'>)

    Raises:
        ValueError: it names none.
    """
    if match := re.fullmatch(r"(local|slurm)(?::([1-9]\d*))?", text):
        return Scheduler(Kind(match[1]), count=int(match[2] or 1))
    if re.fullmatch(r"[a-z]+://\S+", text):
        return Scheduler(Kind.ADDRESS, text)
    raise ValueError(f"{text!r} is no scheduler: {_FORMS}")


@contextmanager
def connected(scheduler: Scheduler, jobs: int | None = None) -> Iterator[Client]:
    """A client of the scheduler; workers that were started for it end with the block.

    Args:
        scheduler: which.
        jobs: how many tasks may run at once on workers of this process; None: as many as there are cores.

    Raises:
        UsageError: Dask is not installed, nothing answers, or Slurm's jobs are not described.
    """
    try:
        import distributed  # noqa: F401, PLC0415 - for the option alone
    except ImportError as e:
        raise UsageError(
            "--scheduler needs Dask: pip install distributed dask-jobqueue, or run this through nox, which "
            "installs them."
        ) from e
    starts = {Kind.ADDRESS: _answering, Kind.LOCAL: _local, Kind.SLURM: _slurm}
    with starts[scheduler.kind](scheduler, jobs) as client:
        yield client


@contextmanager
def _answering(scheduler: Scheduler, _: int | None) -> Iterator[Client]:
    from distributed import Client  # noqa: PLC0415

    try:
        client = Client(scheduler.address, timeout=_PATIENCE)
    except (OSError, ValueError) as e:
        raise UsageError(
            f"no scheduler answers at {scheduler.address} ({e or type(e).__name__}). Start one there: "
            "nox -s cluster -- scheduler."
        ) from e
    with client:
        yield client


@contextmanager
def _local(scheduler: Scheduler, jobs: int | None) -> Iterator[Client]:
    from distributed import Client, LocalCluster  # noqa: PLC0415

    threads = math.ceil((jobs or len(os.sched_getaffinity(0))) / scheduler.count)
    with (
        LocalCluster(
            n_workers=scheduler.count,
            threads_per_worker=threads,
            processes=False,
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def slurm_cluster() -> SLURMCluster:
    """A scheduler here whose workers are jobs of Slurm, as Dask's configuration describes them.

    Raises:
        UsageError: the configuration lacks what a job needs.
    """
    try:
        import dask  # noqa: PLC0415
        from dask_jobqueue import SLURMCluster  # noqa: PLC0415 - fills in its defaults, which are of None
    except ImportError as e:
        raise UsageError("--scheduler slurm needs dask-jobqueue: pip install dask-jobqueue.") from e
    if lacks := [name for name in ("cores", "memory") if not dask.config.get(f"jobqueue.slurm.{name}", None)]:
        raise UsageError(
            f"Slurm's jobs are not described: jobqueue.slurm in ~/.config/dask/jobqueue.yaml lacks "
            f"{' and '.join(lacks)} (docs/machines.md)."
        )
    return SLURMCluster(scheduler_options={"dashboard_address": "127.0.0.1:0"})


@contextmanager
def _slurm(scheduler: Scheduler, _: int | None) -> Iterator[Client]:
    from distributed import Client  # noqa: PLC0415

    with slurm_cluster() as cluster:
        try:
            cluster.scale(jobs=scheduler.count)
            with Client(cluster) as client:
                console.note(
                    f"{scheduler.count} jobs of Slurm asked for; scheduler {cluster.scheduler_address}"
                )
                yield client
        finally:
            with suppress(OSError):
                cluster.scale(0)

"""What ``build --scheduler`` does on workers; Dask is imported for it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from scripts.base import console
from scripts.wheels import cluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.base.errors import BuildError
    from scripts.source.matrix import Matrix
    from scripts.wheels.build import BuildOptions, Place
    from scripts.wheels.choice import Job


def compile_for(
    loaded: Matrix, jobs: Sequence[Job], how: BuildOptions, place: Place, scheduler: cluster.Scheduler
) -> dict[Job, BuildError]:
    """Have the jobs' kernel files compiled; the jobs for which that failed."""
    with cluster.connected(scheduler, how.jobs) as client:
        from scripts.wheels import cluster_build  # noqa: PLC0415 - imports Dask

        return cluster_build.compile_for(loaded, jobs, how, place, client)


def plan(loaded: Matrix, jobs: Sequence[Job], place: Place, scheduler: cluster.Scheduler) -> None:
    """Tell which workers would compile what, and how long that would take."""
    with cluster.connected(scheduler) as client:
        from scripts.wheels import cluster_plan  # noqa: PLC0415 - imports Dask

        planned = cluster_plan.planned(loaded, jobs, place, client)
    table = Table("worker", "at once", "GB", "toolchains", "files", "until")
    for worker in planned.workers:
        table.add_row(
            worker.name,
            str(worker.at_once),
            f"{worker.memory / 1e9:.0f}",
            ", ".join(worker.toolchains) or "refused",
            str(worker.files),
            console.duration(worker.until),
        )
    console.out.print(table)
    console.note(
        f"{planned.files} files, {console.duration(planned.cpu_seconds)} in a row, nothing cached; "
        f"the longest takes {console.duration(planned.longest)}"
    )

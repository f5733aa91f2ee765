"""What ``build --scheduler`` does on workers; Dask is imported for it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from scripts.base import console
from scripts.wheels.cluster import schedulers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.base.errors import BuildError
    from scripts.source.matrix import Matrix
    from scripts.wheels.building.build import BuildOptions, Place
    from scripts.wheels.building.jobs import Job


def compile_for(
    loaded: Matrix, jobs: Sequence[Job], how: BuildOptions, place: Place, scheduler: schedulers.Scheduler
) -> dict[Job, BuildError]:
    """Have the jobs' kernel files compiled; the jobs for which that failed."""
    with schedulers.connected(scheduler, how.jobs) as client:
        from scripts.wheels.cluster import compile_jobs  # noqa: PLC0415 - imports Dask

        return compile_jobs.compile_for(loaded, jobs, how, place, client)


def plan(loaded: Matrix, jobs: Sequence[Job], place: Place, scheduler: schedulers.Scheduler) -> None:
    """Tell which workers would compile what, and how long that would take."""
    with schedulers.connected(scheduler) as client:
        from scripts.wheels.cluster import dry_run  # noqa: PLC0415 - imports Dask

        planned = dry_run.planned(loaded, jobs, place, client)
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

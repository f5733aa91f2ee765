"""What a build would have compiled where: the plan of ``--dry-run --scheduler``."""

from __future__ import annotations

import heapq
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scripts.base import console
from scripts.series import clone
from scripts.source import upstream
from scripts.wheels.cluster import admission, compile_jobs, tasks, work_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import Client

    from scripts.source.matrix import Matrix
    from scripts.wheels.building.build import Place
    from scripts.wheels.building.jobs import Job


@dataclass
class Planned:
    """One worker of a plan."""

    name: str
    at_once: int
    memory: float
    toolchains: tuple[str, ...]  # CUDA releases
    files: int = 0
    until: float = 0.0


@dataclass
class Plan:
    """A plan over workers."""

    workers: list[Planned] = field(default_factory=list)
    files: int = 0
    cpu_seconds: float = 0.0
    longest: float = 0.0
    without: dict[str, str] = field(default_factory=dict)  # CUDA releases that no worker has, and why


def planned(loaded: Matrix, jobs: Sequence[Job], place: Place, client: Client) -> Plan:
    """Ask the workers, and give each file to the one that is free first, the longest first."""
    _, applied = clone.apply(loaded, upstream.Source.AUTO)
    shares, failed = compile_jobs.shares_of(loaded, jobs, applied, place)
    for job, error in failed.items():
        console.warn(f"{job.target.name}: {error}")
    todo = work_list.files_of([*shares.values()], uuid.uuid4().hex[:8], tasks.on_this_machine)
    return over(client, todo) if todo else Plan()


def over(client: Client, todo: Sequence[work_list.File]) -> Plan:
    """The plan of files over the workers that there are."""
    orders = {file.order.key: file.order for file in todo}
    least = max(file.unit.memory for file in todo)
    plugin = admission.Admission(
        f"fa2-{todo[0].order.run}", tuple(orders.values()), admission.measuring_memory(least)
    )
    with admission.Roster(client, plugin) as members:
        return placed(todo, [*members.members.values()])


def placed(todo: Sequence[work_list.File], members: Sequence[admission.Member]) -> Plan:
    """The same, when the workers have answered."""
    plan = Plan(files=len(todo), cpu_seconds=sum(file.unit.seconds for file in todo))
    plan.longest = max(file.unit.seconds for file in todo)
    each = {admission.MEMORY: min(file.unit.memory for file in todo)}
    free: list[tuple[float, int]] = []
    for at, member in enumerate(members):
        has = {file.order.target.cuda for file in todo if not member.refusals.get(file.order.resource, "?")}
        slots = max(member.slots(file.order.resource, each) for file in todo)
        plan.workers.append(
            Planned(member.name, slots, member.measured[admission.MEMORY], tuple(sorted(has)))
        )
        free += [(0.0, at)] * slots
    heapq.heapify(free)
    for file in todo:
        fitting = [slot for slot in free if file.order.target.cuda in plan.workers[slot[1]].toolchains]
        if not fitting:
            continue
        first = min(fitting)
        free.remove(first)
        end = first[0] + file.unit.seconds
        free.append((end, first[1]))
        worker = plan.workers[first[1]]
        worker.files += 1
        worker.until = max(worker.until, end)
    return plan

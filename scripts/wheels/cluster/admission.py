"""Which workers of a scheduler may have which tasks, and why others are refused.

A plugin goes to every worker, also to those that come later. There it answers questions, such as whether the
toolchain is the build's. What a worker may have becomes a resource of Dask's, named by the question, so the
scheduler itself gives no task to a worker that was refused.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import psutil
from distributed import Worker, WorkerPlugin

from scripts.base import console, layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distributed import Client

    from scripts.wheels.cluster import source_archive

MEMORY, GPU = "memory", "gpu"


def _code_digest() -> str:
    """What this program is, and the suites that it runs: as the files are while they are imported."""
    folders = (layout.ROOT / "scripts", layout.ROOT / "tests/wheel", layout.ROOT / "tests/wheel4")
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(f"{path.relative_to(layout.ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


CODE = _code_digest()


class Question(Protocol):
    """What a worker is asked, on the worker."""

    @property
    def resource(self) -> str:
        """The resource that a worker gets which answers well."""

    def refusal(self) -> str:
        """Why this worker is refused, as the end of a sentence; empty where it is not."""


def memory_of(worker: Worker, *, least: float) -> dict[str, float]:
    """The bytes that compilers may take: what is free, or less where Dask was told so.

    Never less than ``least``, what the largest task needs: alone it may run anywhere.
    """
    allowed = worker.memory_manager.memory_limit or float("inf")
    return {MEMORY: max(least, min(float(psutil.virtual_memory().available), float(allowed)))}


def measuring_memory(least: float) -> Callable[[Worker], dict[str, float]]:
    """:func:`memory_of` for tasks of which the largest needs ``least`` bytes."""
    return partial(memory_of, least=least)


class Admission(WorkerPlugin):  # type: ignore[misc] # Dask counts as untyped
    """Answers questions on each worker, and gives it resources accordingly."""

    def __init__(
        self,
        name: str,
        questions: Sequence[Question],
        measure: Callable[[Worker], dict[str, float]],
        luggage: source_archive.Packed | None = None,
    ) -> None:
        self.name = name
        self.code = CODE
        self.questions = tuple(questions)
        self.measure = measure
        self.luggage = luggage  # what tasks need; as a task's input it would draw all to one worker
        self.refusals: dict[str, str] | None = None  # by resource; None: not asked yet
        self.measured: dict[str, float] = {}

    async def setup(self, worker: Worker) -> None:
        """Ask, and give resources."""
        refusals = {q.resource: await asyncio.to_thread(_asked, q, self.code) for q in self.questions}
        self.measured = await asyncio.to_thread(self.measure, worker)
        threads = float(worker.state.nthreads)
        granted = {name: 0.0 if why else threads for name, why in refusals.items()}
        await worker.set_resources(**granted, **self.measured)
        self.refusals = refusals

    async def teardown(self, worker: Worker) -> None:
        """Take the resources back that are of this run alone."""
        await worker.set_resources(**dict.fromkeys(self.refusals or {}, 0.0))


def _asked(question: Question, code: str) -> str:
    """A question's answer; a worker that cannot tell is refused too."""
    if code != CODE:
        return "its scripts/ or tests/wheel* are not the build's; update its checkout and start it again"
    try:
        return question.refusal()
    except Exception as e:  # noqa: BLE001 - whatever it is, the one who asked must hear of it
        return f"it could not be asked: {type(e).__name__}: {e}"


def _answers(name: str, dask_worker: Worker) -> tuple[dict[str, str], dict[str, float]] | None:
    """What a worker answered; None as long as it is being asked."""
    plugin = cast("Admission | None", dask_worker.plugins.get(name))
    return None if plugin is None or plugin.refusals is None else (plugin.refusals, plugin.measured)


@contextmanager
def unless_gone(client: Client) -> Iterator[None]:
    """Leave out what cannot be done any more, where the scheduler is gone."""
    try:
        yield
    except Exception:
        if client.status == "running":
            raise


def luggage_of(worker: Worker, name: str) -> source_archive.Packed | None:
    """What a run's plugin brought to a worker."""
    return cast("Admission", worker.plugins[name]).luggage


@dataclass
class Member:
    """A worker, and what it answered."""

    name: str
    threads: int
    refusals: dict[str, str]
    measured: dict[str, float]

    def slots(self, resource: str, each: dict[str, float]) -> int:
        """How many tasks it may have at once, of which each needs so much."""
        if self.refusals.get(resource, "it was not asked"):
            return 0
        counts = [int(self.measured.get(name, 0.0) // amount) for name, amount in each.items()]
        return min(self.threads, *(max(1, count) for count in counts))


@dataclass
class Roster:
    """The workers, as the client knows them."""

    client: Client
    admission: Admission
    members: dict[str, Member] = field(default_factory=dict)  # by address
    ever: set[str] = field(default_factory=set)  # resources that some worker had
    asking: bool = False  # whether some worker has not answered yet

    def __enter__(self) -> Roster:
        """Ask all workers."""
        self.client.register_plugin(self.admission, name=self.admission.name)
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        """Take everything back, where the scheduler still answers."""
        with unless_gone(self.client):
            self.client.unregister_worker_plugin(self.admission.name)

    def refresh(self) -> None:
        """Learn which workers came and went, and tell."""
        listed = self.client.scheduler_info(n_workers=-1)["workers"]
        for address in [*self.members]:
            if address not in listed:
                gone = self.members.pop(address)
                console.warn(f"worker {gone.name} ({address}) is gone; others get its tasks.")
        self.asking = False
        if new := [address for address in listed if address not in self.members]:
            said = self.client.run(_answers, self.admission.name, workers=new, on_error="ignore")
            for address, answer in said.items():
                if answer is None:
                    self.asking = True
                else:
                    self._admit(address, str(listed[address]["name"]), listed[address]["nthreads"], answer)

    def _admit(
        self, address: str, name: str, threads: int, answer: tuple[dict[str, str], dict[str, float]]
    ) -> None:
        member = Member(name, threads, *answer)
        self.members[address] = member
        # Without a name Dask calls a worker by its address.
        where = f"worker {name}" if name == address else f"worker {name} ({address})"
        for why in dict.fromkeys(filter(None, member.refusals.values())):
            console.warn(f"{where} is refused: {why}.")
        taken = [resource for resource, why in member.refusals.items() if not why]
        self.ever.update(taken)
        if taken:
            facts = [f"{threads} at once"]
            if MEMORY in member.measured:
                facts.append(f"{member.measured[MEMORY] / 1e9:.0f} GB")
            if GPU in member.measured:
                facts.append(f"{member.measured[GPU]:.0f} GPUs")
            console.note(f"{where}: {', '.join(facts)}")

    def refused(self, resource: str) -> list[str]:
        """Why no worker may have tasks of this resource, a line for each worker."""
        return [
            f"    worker {member.name}: {member.refusals[resource]}"
            for member in self.members.values()
            if member.refusals.get(resource)
        ]

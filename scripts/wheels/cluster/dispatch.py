"""Compile the kernel files of a build on the workers of a Dask scheduler.

As many files are handed out as workers can take, the longest that waits first. So a worker that comes later
gets its share, and the files of one that dies go to others. An object is written where a build looks for it,
as soon as it is there.
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed import wait
from distributed.scheduler import KilledWorker

from scripts.base import console, files
from scripts.base.errors import BuildError, CompileError, ToolchainError
from scripts.wheels.cluster import admission, compile_history, source_archive, tasks
from scripts.wheels.cluster.work_list import File, Share, files_of
from scripts.wheels.compiling.ninja import Compiled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from distributed import Client, Future


_LOOK = 2.0  # seconds between two looks at who is there


@dataclass
class _Run:
    """A build's files on their way."""

    client: Client
    members: admission.Roster
    waiting: list[File]  # the longest first
    limit: int | None
    running: dict[Future, File] = field(default_factory=dict)
    failed: dict[str, BuildError] = field(default_factory=dict)  # by the key of an order
    made: list[tuple[File, tasks.Made]] = field(default_factory=list)
    tries: int = 0

    def slots(self, file: File) -> int:
        """How many files of this one's order workers can take at once."""
        each = {admission.MEMORY: file.unit.memory}
        return sum(member.slots(file.order.resource, each) for member in self.members.members.values())

    def hand_out(self) -> None:
        """Give out what workers can take now."""
        for file in [*self.waiting]:
            busy = sum(other.order.key == file.order.key for other in self.running.values())
            if busy >= self.slots(file) or (self.limit and len(self.running) >= self.limit):
                continue
            if not self._fits(file):
                continue
            self.waiting.remove(file)
            self.tries += 1
            future = self.client.submit(
                tasks.compile_kernel,
                file.order,
                file.kernel,
                key=f"kernel-{file.order.run}-{self.tries}-{file.kernel.name}",
                resources={file.order.resource: 1, admission.MEMORY: file.unit.memory},
                priority=round(file.unit.seconds),
            )
            self.running[future] = file

    def _fits(self, file: File) -> bool:
        """Whether all workers together have a place left: one may serve several orders."""
        places = sum(
            member.threads
            for member in self.members.members.values()
            if any(not why for why in member.refusals.values())
        )
        return len(self.running) < places and file.order.key not in self.failed

    def collect(self, done: Sequence[Future]) -> list[File]:
        """Take what is finished; the files of which there is an object now."""
        finished = []
        for future in done:
            file = self.running.pop(future, None)
            if file is None:  # given up meanwhile
                continue
            if future.status == "finished":
                made = future.result()
                _keep(file.unit.target, made.content)
                self.made.append((file, made))
                if not made.hits:  # it was compiled, not answered by a cache
                    compile_history.note(
                        file.known_as, compile_history.Taken(seconds=made.seconds, memory=made.memory)
                    )
                finished.append(file)
            elif future.status == "error":
                self._fail(file, future.exception())
            else:  # cancelled or lost, as after the scheduler was started anew
                self.waiting.insert(0, file)
        return finished

    def _fail(self, file: File, cause: BaseException | None) -> None:
        """Give up the files of this one's order; others go on."""
        if isinstance(cause, KilledWorker):
            cause = CompileError(
                f"{file.unit.source} ended {cause.allowed_failures + 1} workers, the last was "
                f"{cause.last_worker.name}. Did they run out of memory? Start them with fewer --jobs."
            )
        if not isinstance(cause, BuildError):
            cause = CompileError(f"{file.unit.source}: {type(cause).__name__}: {cause}")
        self.failed.setdefault(file.order.key, cause)
        self.waiting = [other for other in self.waiting if other.order.key != file.order.key]
        given_up = [f for f, other in self.running.items() if other.order.key == file.order.key]
        self.client.cancel(given_up, force=True)
        for future in given_up:
            del self.running[future]

    def seconds_left(self) -> float:
        """A guess: of those on their way the half is done."""
        left = sum(f.unit.seconds for f in self.waiting) + sum(
            f.unit.seconds / 2 for f in self.running.values()
        )
        return left / max(1, len(self.running))

    def refuse_orders(self) -> None:
        """Give up orders that no worker there may have, nor ever had."""
        for file in [] if self.members.asking else [*self.waiting]:
            resource, key = file.order.resource, file.order.key
            refused = self.members.refused(resource)
            if key not in self.failed and refused and resource not in self.members.ever:
                self.failed[key] = ToolchainError(
                    f"no worker has the toolchain of {file.order.target.name}, nvcc {file.order.nvcc} and "
                    f"{file.order.cxx}:\n" + "\n".join(refused)
                )
        self.waiting = [file for file in self.waiting if file.order.key not in self.failed]


def _keep(target: Path, content: bytes) -> None:
    """An object appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def compile_on(
    client: Client,
    shares: Sequence[Share],
    jobs: int | None,
    find: tasks.Finder = tasks.on_this_machine,
) -> tuple[Compiled, dict[str, BuildError]]:
    """Compile what is not there yet of several plans, whose tree and build folder are one.

    Args:
        client: of the scheduler.
        shares: what to compile.
        jobs: how many files at once, on all workers together; None: as many as they take.
        find: how a worker finds its toolchain.

    Returns:
        What was compiled, and what failed by the key of the plan's objects. One's failure stops no other.

    Raises:
        CompileError: the scheduler is gone. What was compiled stays for the next run.
        KeyboardInterrupt: likewise, after the compilers were stopped.
    """
    build, started = shares[0].plan.build, time.monotonic()
    with files.in_turn(build / "compile.lock", "compiles in this clone"):
        run = uuid.uuid4().hex[:8]
        todo = files_of(shares, run, find)
        if not todo:
            return Compiled((), 0, 0.0, 0, 0), {}
        try:
            done = _compile_on(client, shares, todo, jobs)
        except Exception as e:
            if client.status == "running":
                raise
            raise CompileError(
                f"the scheduler is gone ({type(e).__name__}: {e}). What was compiled is kept: the same "
                "command goes on from there."
            ) from e
    objects = tuple(file.unit.target for file, _ in done.made)
    hits, misses = (sum(getattr(made, name) for _, made in done.made) for name in ("hits", "misses"))
    return Compiled(objects, len(objects), time.monotonic() - started, hits, misses), done.failed


def _compile_on(client: Client, shares: Sequence[Share], todo: list[File], jobs: int | None) -> _Run:
    packed = source_archive.pack(shares[0].plan.tree)
    console.note(
        f"{len(todo)} files to compile; their sources have {len(packed.content) / 1e6:.1f} MB packed"
    )
    orders = {file.order.key: file.order for file in todo}
    least = max(file.unit.memory for file in todo)
    measure = admission.measuring_memory(least)
    plugin = admission.Admission(todo[0].order.plugin, tuple(orders.values()), measure, packed)
    with admission.Roster(client, plugin) as members:
        run = _Run(client, members, todo, jobs)
        try:
            _follow(run)
        finally:
            with admission.unless_gone(client):
                client.cancel([*run.running], force=True)
    return run


def _follow(run: _Run) -> None:
    """Hand out and collect until nothing is left."""
    looked, told = time.monotonic(), False
    with console.progress("compiling on workers", len(run.waiting), 0) as advance:
        while run.waiting or run.running:
            if time.monotonic() - looked > _LOOK:
                run.members.refresh()
                looked = time.monotonic()
            run.refuse_orders()
            run.hand_out()
            if run.waiting and not run.running and not told:
                console.note("no worker is there; waiting for one (Ctrl-C ends it)")
                told = True
            for file in run.collect(_finished([*run.running])):
                advance(file.unit.source.rpartition("/")[2], run.seconds_left())
    run.members.refresh()  # who left since, is told


def _finished(running: list[Future]) -> list[Future]:
    """Those that are no longer on their way, when there is one; at the latest after a while."""
    if not running:
        time.sleep(_LOOK / 10)
        return []
    with suppress(TimeoutError, CancelledError):
        wait(running, timeout=_LOOK, return_when="FIRST_COMPLETED")
    return [future for future in running if future.status != "pending"]

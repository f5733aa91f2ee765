"""Prove wheels on workers that have a GPU for them, and collect the proofs.

A worker runs ``verify`` as a person there would, in its own checkout and on a GPU of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import dask.config
from distributed import get_worker, wait
from distributed.scheduler import KilledWorker

from scripts.base import console, layout
from scripts.base.errors import BuildError, NotVerified, VerifyError
from scripts.base.fetch import sha256
from scripts.base.process import last_lines, tied
from scripts.wheels.cluster import admission
from scripts.wheels.proof import machine_gpus, verify
from scripts.wheels.trust import companions
from scripts.wheels.trust.models import read_proof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distributed import Client, Future, Worker

Finder: TypeAlias = "Callable[[], tuple[machine_gpus.Gpu, ...]]"
_LOOK = 2.0


@dataclass(frozen=True)
class Need:
    """What a worker must have to prove a wheel."""

    run: str
    wheel: str  # its name
    sha256: str
    architectures: tuple[str, ...]  # none: of a wheel whose kernels are compiled at their first use
    cuda: str  # its release, or empty
    find: Finder = machine_gpus.found

    @property
    def resource(self) -> str:
        """What a worker has that can prove it."""
        return f"proves-{self.run}-{self.sha256}"

    def refusal(self) -> str:
        """Why this machine cannot prove it."""
        found = self.find()
        if not found:
            return "it has no GPU that nvidia-smi tells of"
        if not any(machine_gpus.runs(gpu, self.architectures, self.cuda) for gpu in found):
            return (
                "; ".join(
                    f"its {gpu.name} has compute capability {gpu.compute_capability} and driver {gpu.driver}"
                    for gpu in found
                )
                + f", {self.wheel} is for {machine_gpus.wanted(self.architectures, self.cuda)}"
            )
        return ""


def gpus_of(worker: Worker, *, find: Finder) -> dict[str, float]:
    """How many GPUs a worker has: as it was told (--resources gpu=N), or as its driver tells."""
    return {admission.GPU: float(worker.state.total_resources.get(admission.GPU, len(find())))}


@dataclass(frozen=True)
class Answer:
    """What ``verify`` came to on a worker."""

    status: int
    said: str
    proof: bytes | None
    worker: str


_busy: set[str] = set()  # GPUs of this worker on which a suite runs
_lock = threading.Lock()


@contextmanager
def _a_gpu(need: Need) -> Iterator[machine_gpus.Gpu]:
    """A GPU that fits, for one suite alone: another's kernels would slow it and take its memory."""
    taken: machine_gpus.Gpu | None = None
    while taken is None:
        with _lock:
            fitting = [gpu for gpu in need.find() if machine_gpus.runs(gpu, need.architectures, need.cuda)]
            taken = next((gpu for gpu in fitting if gpu.uuid not in _busy), None)
            if taken:
                _busy.add(taken.uuid)
        if taken is None:
            time.sleep(_LOOK / 10)
    try:
        yield taken
    finally:
        with _lock:
            _busy.discard(taken.uuid)


def prove(need: Need, content: bytes, program: tuple[str, ...]) -> Answer:
    """Run ``verify`` on this worker.

    Args:
        need: which wheel.
        content: its bytes.
        program: what is run, with the wheel's place as a last argument.
    """
    worker = get_worker()
    with (
        _a_gpu(need) as gpu,
        tempfile.TemporaryDirectory(dir=worker.local_directory, prefix="prove-") as place,
    ):
        path = Path(place) / need.wheel
        path.write_bytes(content)
        done = subprocess.run(
            tied([*(program or (sys.executable, "-m", "scripts", "verify")), path]),
            cwd=layout.ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        proof = companions.proof(path)
        kept = proof.read_bytes() if proof.is_file() else None
        return Answer(done.returncode, done.stdout, kept, f"{worker.name}, {gpu.name}")


def need_of(path: Path, run: str, find: Finder = machine_gpus.found) -> Need:
    """What a wheel says of itself that decides where it can be proved."""
    facts = verify.facts_of(path)
    told = facts.provenance
    machine_gpus.first_driver(told.cuda)  # here: a worker that cannot tell is asked in vain
    return Need(run, path.name, sha256(path), told.architectures, told.cuda, find)


def prove_on(
    client: Client,
    wheels: Sequence[Path],
    program: tuple[str, ...] = (),
    find: Finder = machine_gpus.found,
) -> dict[Path, BuildError]:
    """Prove wheels, each on a worker that fits, and leave each proof beside its wheel.

    Args:
        client: of the scheduler.
        wheels: their places.
        program: another program than ``verify``.
        find: how a worker finds its GPUs.

    Returns:
        The wheels that were not proved, and why.
    """
    run, failed, needs = uuid.uuid4().hex[:8], {}, {}
    for path in wheels:
        try:
            needs[path] = need_of(path, run, find)
        except BuildError as e:
            failed[path] = e
    for error in failed.values():
        console.error(str(error))
    if not needs:
        return failed
    plugin = admission.Admission(f"fa2-{run}", tuple(needs.values()), partial(gpus_of, find=find))
    with admission.Roster(client, plugin) as members:
        _wait_for_answers(members)
        running: dict[Future, Path] = {}
        for path, need in needs.items():
            if need.resource not in members.ever:
                reasons = "\n".join(members.refused(need.resource))
                failed[path] = NotVerified(f"{path.name} is NOT VERIFIED: no worker can prove it:\n{reasons}")
                console.error(str(failed[path]))
                continue
            with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GB"}):
                future = client.submit(
                    prove,
                    need,
                    path.read_bytes(),
                    program,
                    key=f"prove-{run}-{len(running)}-{need.sha256}",
                    resources={need.resource: 1, admission.GPU: 1},
                )
            running[future] = path
        failed |= _collected(client, members, running)
    return failed


def _wait_for_answers(members: admission.Roster) -> None:
    told = False
    while members.asking or not members.members:
        if not told and not members.members:
            console.note("no worker is there; waiting for one (Ctrl-C ends it)")
            told = True
        time.sleep(_LOOK / 4)
        members.refresh()


def _collected(
    client: Client, members: admission.Roster, running: dict[Future, Path]
) -> dict[Path, BuildError]:
    """Take each answer as it comes; what was not proved, and why."""
    failed: dict[Path, BuildError] = {}
    try:
        while running:
            with suppress(TimeoutError, CancelledError):
                wait([*running], timeout=_LOOK, return_when="FIRST_COMPLETED")
            members.refresh()
            for future in [future for future in running if future.status != "pending"]:
                path = running.pop(future)
                try:
                    _take(path, future)
                except BuildError as e:
                    failed[path] = e
                    console.error(str(e))
    finally:
        client.cancel([*running], force=True)
    return failed


def _take(path: Path, future: Future) -> None:
    """Keep the proof of an answer.

    Raises:
        VerifyError: the suite failed, or its proof is of another wheel.
        NotVerified: its GPU half did not run.
    """
    if future.status != "finished":
        cause = future.exception() if future.status == "error" else future.status
        why = "it ended every worker that it ran on" if isinstance(cause, KilledWorker) else str(cause)
        raise VerifyError(f"{path.name} could not be proved: {why}.")
    answer: Answer = future.result()
    if answer.proof is not None:
        with tempfile.TemporaryDirectory() as folder:
            proof = Path(folder) / "proof.json"
            proof.write_bytes(answer.proof)
            verify.keep_proof(path, proof, read_proof(proof))
    if answer.status != 0 or answer.proof is None:
        kind = NotVerified if answer.status == NotVerified.exit_code else VerifyError
        raise kind(
            f"{path.name}: not proved on worker {answer.worker} (status {answer.status}):\n"
            f"{last_lines(answer.said)}"
        )
    console.done(f"{path.name} is verified on worker {answer.worker}. The proof is {companions.proof(path)}.")

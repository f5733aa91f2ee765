"""``cluster``: run a Dask scheduler, or a worker, with what this repository needs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from scripts.base import console, layout
from scripts.base.errors import UsageError
from scripts.commands import arguments
from scripts.source import matrix
from scripts.wheels.cluster import schedulers
from scripts.wheels.proof import machine_gpus
from scripts.wheels.toolchain import compilers

if TYPE_CHECKING:
    import argparse

_PORT = 8786  # Dask's own


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(
        commands,
        "cluster",
        "On one machine: nox -s cluster -- scheduler. On each that compiles or proves, in a checkout of the "
        "same commit: nox -s cluster -- worker tcp://HOST:8786. Then nox -s build -- --scheduler "
        "tcp://HOST:8786. Whoever reaches the scheduler can run programs on workers: keep it to a network "
        "you trust, or use tls:// (docs/machines.md).",
    )
    parser.add_argument("what", nargs="?", choices=["scheduler", "worker"], help="what to run, until Ctrl-C")
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help="worker: the scheduler's")
    parser.add_argument("--host", metavar="ADDRESS", help="the address to listen at (default: all)")
    parser.add_argument("--port", metavar="N", type=arguments.positive, help=f"scheduler (default: {_PORT})")
    parser.add_argument("--name", help="worker: what it is called (default: its address)")
    arguments.add_jobs(parser, "worker: compilers at once, where the memory is enough")
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="worker: install this target's CUDA first, where the machine has none that fits",
    )
    parser.set_defaults(run=_run, interrupted="ended.")


def _run(options: argparse.Namespace) -> None:
    if options.what is None:
        raise UsageError("say what to run: nox -s cluster -- scheduler, or nox -s cluster -- worker ADDRESS.")
    words = _scheduler(options) if options.what == "scheduler" else _worker(options)
    os.execv(sys.executable, [sys.executable, "-m", *words])  # noqa: S606 - Dask's own programs


def _scheduler(options: argparse.Namespace) -> list[str]:
    """The words that start a scheduler."""
    if options.address or options.name or options.jobs or options.target:
        raise UsageError("ADDRESS, --name, --jobs and --target are for cluster -- worker.")
    host = ["--host", options.host] if options.host else []
    return ["distributed.cli.dask_scheduler", *host, "--port", str(options.port or _PORT), "--no-dashboard"]


def _worker(options: argparse.Namespace) -> list[str]:
    """The words that start a worker: one process, with a thread for each compiler."""
    if options.port:
        raise UsageError("--port is for cluster -- scheduler.")
    try:
        address = schedulers.parse(options.address or "")
    except ValueError:
        address = None
    if address is None or address.kind is not schedulers.Kind.ADDRESS:
        raise UsageError("name the scheduler: nox -s cluster -- worker tcp://HOST:8786.")
    if options.target:
        target = matrix.load(layout.MATRIX).named(options.target)
        tools = compilers.toolkit(target, layout.cache("toolkit"), layout.BUILD / "logs")
        console.note(f"nvcc {tools.version}: {tools.why}")
    threads = options.jobs or len(os.sched_getaffinity(0))
    words = ["distributed.cli.dask_worker", address.address, "--nworkers", "1", "--nthreads", str(threads)]
    words += ["--no-dashboard", *(["--name", options.name] if options.name else [])]
    words += ["--host", options.host] if options.host else []
    found = machine_gpus.found()
    return [*words, *(["--resources", f"gpu={len(found)}"] if found else [])]

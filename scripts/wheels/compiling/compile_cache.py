"""The compile cache, sccache: a server of our own, and whether it answered what it should have."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from packaging.version import Version

from scripts.base import layout
from scripts.base.errors import CompileError
from scripts.base.process import last_lines, run, tied
from scripts.wheels.compiling.flags import environment, front_halves
from scripts.wheels.compiling.kernels import digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scripts.wheels.compiling.kernels import Compilation, Unit
    from scripts.wheels.toolchain.compilers import Toolchain

_PATIENCE = 60  # seconds, which only a server that hangs takes, or a very busy machine
_SHARES_FROM = Version(
    "0.18"
)  # the sccache that keeps several machine targets of one PTX (its issues 2722, 2811)


def keeps(plan: Compilation) -> bool:
    """Whether the compile cache can keep this plan's kernel compiles.

    sccache runs one ptxas a PTX alone, and then misses the others' output.
    """
    cache = plan.toolchain.sccache
    if (
        cache is None
        or plan.flavour.code
        or all(len(group) == 1 for group in front_halves(plan.architectures, plan.shared_ptx).values())
    ):
        return cache is not None
    answer = run([cache, "--version"], error=CompileError, what="the compile cache does not work")
    return Version(answer.split()[1]) >= _SHARES_FROM


def _end_tree(pid: int) -> None:
    """End a process and all that it started; the server starts compilers in sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        root.suspend()  # so that it starts nothing more
        tree = [*root.children(recursive=True), root]
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree[:-1], timeout=_PATIENCE)


@contextmanager
def server(toolchain: Toolchain, root: Path, log: Path) -> Iterator[dict[str, str]]:
    """A compile cache server of our own: one already running keeps its settings, and ours ends with us.

    The compilers are the server's children; they end when the block is left.
    """
    if toolchain.sccache is None:
        yield {}
        return
    with (
        tempfile.TemporaryDirectory(prefix="fa2-sccache-") as folder,
        log.open("w", encoding="utf-8") as messages,
    ):
        socket = Path(folder) / "socket"
        env = {
            "SCCACHE_SERVER_UDS": str(socket),
            # Keeps the clone's path out of the preprocessed text; nvcc's later steps still have it in their
            # key.
            "SCCACHE_BASEDIRS": str(root),
            # Else a clone may get another one's object though their headers differ: sccache 0.16 notes where
            # the headers lie, and compares those of the clone that came first.
            "SCCACHE_DIRECT": "false",
            "SCCACHE_IDLE_TIMEOUT": "0",
        }
        foreground = {**environment(), **env, "SCCACHE_START_SERVER": "1", "SCCACHE_NO_DAEMON": "1"}
        server = subprocess.Popen(
            tied([toolchain.sccache]),
            env=foreground,
            stdout=messages,
            stderr=messages,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + _PATIENCE
            while not socket.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise CompileError(
                        f"the compile cache did not start:\n{last_lines(log.read_text(encoding='utf-8'))}\n"
                        f"The full log is {log}. Build with --no-cache to go without."
                    )
                time.sleep(0.02)
            yield env
        finally:
            # An entry is written aside and renamed, so ending the server damages none.
            _end_tree(server.pid)
            server.wait()


@dataclass(frozen=True)
class Stats:
    """What a server says of the calls that it was given."""

    hits: int = 0
    misses: int = 0
    refused: tuple[str, ...] = ()  # why calls could not be cached at all
    location: str = ""
    version: str = ""


def stats(toolchain: Toolchain, env: dict[str, str]) -> Stats:
    """Ask the server of :func:`server`, when what was compiled is written."""
    if toolchain.sccache is None:
        return Stats()
    command = [str(toolchain.sccache), "--show-stats", "--stats-format=json"]
    deadline = time.monotonic() + _PATIENCE
    while True:
        shown = subprocess.run(
            command, env={**os.environ, **env}, capture_output=True, text=True, check=False
        )
        if shown.returncode != 0:
            return Stats()
        answer = json.loads(shown.stdout)
        stats = answer["stats"]
        hits, misses = (sum(stats[name]["counts"].values()) for name in ("cache_hits", "cache_misses"))
        # What was compiled is written after the compiler's answer was passed on; the server must live until
        # then.
        if stats["cache_writes"] + stats["cache_write_errors"] >= misses or time.monotonic() > deadline:
            return Stats(
                hits, misses, tuple(stats["not_cached"]), answer["cache_location"], answer["version"]
            )
        time.sleep(0.05)


def check(told: Stats, tools: Toolchain, units: Sequence[Unit], began: float) -> None:
    """A cache that does not answer costs hours and says nothing; so we do.

    What another build compiled since this one ``began``, in seconds since the epoch, was no answer yet.

    Raises:
        CompileError: a call that the cache refuses, or not one answered of kernel files that went through
            this cache before.
            (The binding misses it rightly when Python's headers lie elsewhere.)
    """
    if told.refused:
        raise CompileError(
            f"the compile cache could not keep some calls: {', '.join(told.refused)}. Those are options in "
            "scripts/wheels/compiling/kernels.py that it does not know what to do with. "
            "The objects are kept; --no-cache builds without."
        )
    # With compilers elsewhere, or another sccache, it misses rightly.
    place = digest(told.location, told.version, tools.toolkit.nvcc, tools.cxx)
    marks = [
        layout.cache("compiled") / place / f"{unit.key}-{unit.target.stem}"
        for unit in units
        if unit.key and unit.rule == "nvcc"
    ]
    seen = [when for mark in marks if mark.exists() and (when := mark.stat().st_mtime) < began]
    for mark in marks:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    if (
        seen
        and not told.hits
        and "SCCACHE_RECACHE" not in os.environ
        and _has_entry_before(told.location, max(seen))
    ):
        raise CompileError(
            f"the compile cache ({told.location}) answered none of {told.misses} calls, though {len(seen)} "
            "of these files went through it before. Either it is too small and dropped them "
            "(SCCACHE_CACHE_SIZE), or the commands differ from run to run, which is a fault of "
            "scripts/wheels/compiling/kernels.py. "
            "The objects are kept: the same command now goes on with them."
        )


def _has_entry_before(location: str, moment: float) -> bool:
    """Whether a cache still has anything from before; one that was emptied since cannot answer.

    True of a cache that is no folder here.
    """
    folder = re.search(r'"(.+)"', location)
    if folder is None:
        return True
    return any(path.is_file() and path.stat().st_mtime <= moment for path in Path(folder[1]).rglob("*"))

"""Programs whose output matters only when they fail."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from scripts.base.errors import BuildError

_SHOWN_LINES = 25


def quoted(command: Sequence[str | Path]) -> str:
    """The command as one would type it."""
    return shlex.join(str(part) for part in command)


def tied(command: Sequence[str | Path]) -> list[str]:
    """The command, which ends when the thread that starts it does, even by kill -9 (where setpriv is there).

    What it started itself does not.
    """
    words = [str(part) for part in command]
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--", *words] if setpriv else words


@contextmanager
def interrupts_later() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C and SIGTERM wait until what is given is called, or the block is left.

    A program that has started outlives an interrupt that comes before anything knows of it that would end it.
    A thread other than the main one gets no signals.
    """
    came: list[int] = []
    waiting = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if waiting else ()
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}

    def now() -> None:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: one that Python did not set
        before.clear()
        if came:
            os.kill(os.getpid(), came.pop(0))

    try:
        yield now
    finally:
        now()


def last_lines(text: str, count: int = _SHOWN_LINES) -> str:
    """The end of a program's output, indented."""
    return "\n".join("    " + line for line in text.strip().splitlines()[-count:])


def run(  # noqa: PLR0913 - each is an option of one run, by its name
    command: Sequence[str | Path],
    *,
    error: type[BuildError],
    what: str,
    hint: str = "",
    log: Path | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> str:
    """Run a program and return its standard output.

    Args:
        command: program and arguments.
        error: raised when the program fails or cannot be started.
        what: the step, for the message: "could not install torch".
        hint: what the user may try.
        log: where the whole output goes, both streams; the message names it.
        cwd: working directory.
        env: variables set over the process's own.
        without: variables of the process's own that it does not get.
    """
    merged = {**{name: value for name, value in os.environ.items() if name not in without}, **(env or {})}
    try:
        result = subprocess.run(
            [str(c) for c in command],
            cwd=cwd,
            env=merged,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as e:
        raise error(f"{what}: cannot run {quoted(command)}: {e.strerror}. {hint}".strip()) from e
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"$ {quoted(command)}\n{result.stdout}{result.stderr}", encoding="utf-8")
    if result.returncode != 0:
        parts = [
            f"{what}: {quoted(command)} exited with {result.returncode}.",
            last_lines(result.stdout + "\n" + result.stderr),
        ]
        parts += [f"The full log is {log}."] if log else []
        parts += [hint] if hint else []
        raise error("\n".join(part for part in parts if part))
    return result.stdout

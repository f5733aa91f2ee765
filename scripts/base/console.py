"""What the user sees: progress, results and answers in JSON.

Tables of the commands go to ``out``; nothing else prints.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

out = Console(highlight=False, soft_wrap=True)
if not out.is_terminal:
    out.width = 160  # a log should not wrap tables at 80 columns
err = Console(stderr=True, highlight=False, soft_wrap=True)


def use_json() -> None:
    """Send what people read to stderr, so that stdout holds one JSON document."""
    out.file = sys.stderr


_answered = False


def result(data: Any) -> None:
    """The answer of a command called with ``--json``: the first is the one."""
    global _answered  # noqa: PLW0603 - one document a process
    if _answered:
        return
    _answered = True
    print(json.dumps(data, indent=1), file=sys.stdout)  # noqa: T201 - the one place


def step(text: str) -> None:
    """Announce a step of the work."""
    out.print(Text("› ", style="bold cyan") + Text(text))


def note(text: str) -> None:
    """A fact about the step under way."""
    out.print(Text("  " + text, style="dim"))


def done(text: str) -> None:
    """A result."""
    out.print(Text("✓ ", style="bold green") + Text(text))


def warn(text: str) -> None:
    """Something the user should know, that stops nothing."""
    err.print(Text("! ", style="bold yellow") + Text(text))


def error(text: str) -> None:
    """Why the command failed."""
    err.print(Text("✗ ", style="bold red") + Text(text))


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, to the second.

    >>> duration(7), duration(65), duration(3661)
    ('7s', '1m05s', '1h01m01s')
    """
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02}m{secs:02}s"
    return f"{minutes}m{secs:02}s" if minutes else f"{secs}s"


class _TimeLeft(ProgressColumn):
    """The task's own estimate: files take from one to seven minutes, so a mean rate misleads."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("seconds_left")
        return Text("" if left is None else f"about {duration(left)} left", style="cyan")


@contextmanager
def progress(what: str, total: int, completed: int) -> Iterator[Callable[[str, float], None]]:
    """A bar with files done and total, time elapsed and time left.

    In a log, where bars do not show, it is a line a file.

    Yields:
        A function that counts one more file as done: its name, and the seconds left.
    """
    columns = [
        TextColumn("  {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _TimeLeft(),
    ]
    with Progress(*columns, console=out) as bars:
        bar = bars.add_task(what, total=total, completed=completed)

        def advance(name: str, seconds_left: float) -> None:
            bars.update(bar, advance=1, seconds_left=seconds_left)
            if not out.is_terminal:
                note(f"{bars.tasks[0].completed:.0f}/{total} {name}, about {duration(seconds_left)} left")

        yield advance


@contextmanager
def steps(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar for a few seconds of work in steps that take alike; nothing in a log.

    Yields:
        A function that counts one more step as done, by its name.
    """
    if not out.is_terminal:
        yield lambda _: None
        return
    started, done = time.monotonic(), 0
    with progress(what, total, 0) as advance:

        def count(name: str) -> None:
            nonlocal done
            done += 1
            advance(name, (time.monotonic() - started) / done * (total - done))

        yield count

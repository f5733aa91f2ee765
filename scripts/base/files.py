"""Write a file whole or not at all; keep two runs out of each other's way."""

from __future__ import annotations

import ctypes
import os
import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from scripts.base import console
from scripts.base.errors import SeriesError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SERIES_LOCK = "series.lock"  # in the build folder


def write(path: Path, text: str) -> None:
    """Replace a file's content: written aside, then renamed; nothing stays behind when that fails.

    Raises:
        OSError: it names ``path``, not the file beside it.
    """
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        aside.unlink(missing_ok=True)


def exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step, so that neither name is ever missing (renameat2 of Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_fdcwd, rename_exchange = -100, 2
    if libc.renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) != 0:
        code = ctypes.get_errno()
        place, copy = shlex.quote(str(other)), shlex.quote(f"{other}.copy")
        raise SeriesError(
            f"{other} could not be replaced in one step: {os.strerror(code)} (the lower layer of an overlay, a file system without exchange?). "
            f"Nothing was changed. Copy it to where it can be: cp -a {place} {copy} && rm -r {place} && mv {copy} {place}"
        )


@contextmanager
def in_turn(path: Path, what: str) -> Iterator[None]:
    """Wait for other runs that do ``what``, and keep others waiting; the lock ends with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.note(f"another run {what}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def alone(build: Path) -> Iterator[None]:
    """Be the only one that writes work trees under ``build``; the lock ends with the process.

    Raises:
        UsageError: another run holds it.
    """
    build.mkdir(parents=True, exist_ok=True)
    lock = FileLock(build / SERIES_LOCK, timeout=0)
    try:
        with lock:
            yield
    except Timeout as e:
        raise UsageError(f"another run is working on the series ({lock.lock_file}); wait for it.") from e

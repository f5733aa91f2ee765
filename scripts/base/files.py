"""Write a file whole or not at all; keep two runs out of each other's way."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shlex
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from scripts.base import console
from scripts.base.errors import SeriesError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SERIES_LOCK = "series.lock"  # in the build folder


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Let an error of writing name this file or folder: a full disk's names none.

    Raises:
        OSError: the block's, with a file name.
    """
    try:
        yield
    except OSError as e:
        if e.filename is not None or e.errno is None:
            raise
        raise OSError(e.errno, e.strerror, str(path)) from e


def write(path: Path, text: str) -> None:
    """Replace a file's content by a text: see :func:`write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content: written aside, then renamed; nothing stays behind when that fails.

    A pipe or a device is written to as it is. So is everything under /dev and /proc: /dev/stdout names the
    file that a shell opened for this process, and another file in its place would reach nobody.

    Raises:
        OSError: it names ``path``, not the file beside it.
    """
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    if is_special or path.absolute().parts[1] in ("dev", "proc"):
        path.write_bytes(content)
        return
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def copy(source: Path, target: Path) -> None:
    """Copy a file, with its mode: aside, then renamed; nothing stays behind when that fails.

    Raises:
        OSError: it names ``target``, not the file beside it.
    """
    part = target.with_name(target.name + ".part")
    try:
        shutil.copy(source, part)
        part.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        part.unlink(missing_ok=True)


def first_of(error: shutil.Error) -> OSError:
    """The first of the errors that copying a folder met, as one of its file."""
    try:
        _, place, why = error.args[0][0]
    except (IndexError, TypeError, ValueError):  # not of a folder
        return OSError(errno.EIO, str(error))
    told = re.match(r"\[Errno (\d+)\] ([^:]*)", str(why))
    return OSError(int(told[1]) if told else errno.EIO, told[2] if told else str(why), str(place))


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder, with modes, but for one: its folders can be written to, whatever the source's can.

    Raises:
        OSError: it names the first file that could not be copied.
    """
    try:
        shutil.copytree(source, target, symlinks=True)
    except shutil.Error as error:
        raise first_of(error) from error
    for folder, _, _ in os.walk(target):
        os.chmod(folder, os.stat(folder).st_mode | 0o700)  # noqa: PTH101, PTH116 - as walk gives it


def exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step, so that neither name is ever missing (renameat2 of Linux).

    Raises:
        SeriesError: the file system refuses; nothing was changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    at_fdcwd, rename_exchange = -100, 2
    if libc.renameat2(at_fdcwd, os.fsencode(new), at_fdcwd, os.fsencode(old), rename_exchange) != 0:
        raise SeriesError(_refusal(ctypes.get_errno(), old))


def _refusal(code: int, folder: Path) -> str:
    """Why a folder could not be swapped, by the system's error number, and what to do."""
    failed = f"{folder} could not be replaced: {os.strerror(code)}. Nothing was changed."
    if code in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY):
        remedy = (
            f"Make it and {folder.parent} writable (a read-only mount, permissions?), and run this again."
        )
        return f"{failed} {remedy}"
    place, copy = shlex.quote(str(folder)), shlex.quote(f"{folder}.copy")
    return (
        f"{failed} A file system without exchange, or the lower layer of an overlay? "
        f"Copy the folder to where it can be: cp -a {place} {copy} && rm -r {place} && mv {copy} {place}"
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

"""A copy of a checkout, in which files can be changed and programs run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import UsageError
from scripts.base.git import Repository
from scripts.base.process import quoted, tied

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.mutations.table import Mutation


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A clone of a checkout, with the files that are not committed; it goes again.

    One at a time: that of a run that was killed goes first.
    """
    with files.in_turn(root / "build/mutations.lock", "changes things in a copy"):
        place = root / "build/mutations"
        shutil.rmtree(place, ignore_errors=True)
        try:
            checkout, copy = Repository(root, UsageError), Repository(place, UsageError)
            checkout.run("clone", "--quiet", "--local", str(root), str(place), writes=False)
            own = _listed(checkout)
            for name in _listed(copy) - own:
                (place / name).unlink()
            for name in own:
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, place / name, follow_symlinks=False)
            (root / "build/env").mkdir(parents=True, exist_ok=True)
            (place / "build").mkdir(exist_ok=True)
            (place / "build/env").symlink_to(root / "build/env")  # a torch takes some GB
            _require_own_modules(place)
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _listed(repository: Repository) -> set[str]:
    """The files of a work tree but those that git ignores."""
    told = repository.run("ls-files", "-z", "--cached", "--others", "--exclude-standard", writes=False)
    there = {name for name in told.split("\0") if name and os.path.lexists(repository.root / name)}
    return {name for name in there if not (repository.root / name).is_dir()}  # a submodule is a folder


def _require_own_modules(copy: Path) -> None:
    """An environment may have the checkout's ``scripts`` installed, which must not be what is tested."""
    status, said = run([sys.executable, "-c", "import scripts; print(scripts.__file__)"], copy, 600)
    if status != 0 or not Path(said.strip()).is_relative_to(copy):
        raise UsageError(f"scripts would not be imported from {copy}: {said.strip()}")


def run(words: Sequence[str], copy: Path, limit: float) -> tuple[int, str]:
    """Run a program in the copy; its status, and what it said. It ends when we do.

    Raises:
        UsageError: it takes more than so many seconds.
    """
    with subprocess.Popen(
        tied(words),
        cwd=copy,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), *_more_modules()])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as e:
            raise UsageError(f"{quoted(words)} took more than {limit:.0f} s.") from e
        finally:
            _end(process)
    return process.returncode, said


def _more_modules() -> list[str]:
    return [path for path in [os.environ.get("PYTHONPATH", "")] if path]


def _end(process: subprocess.Popen[str]) -> None:
    """End a program and what it started; compilers get the time to stop."""
    for how, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, how)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


def change(path: Path, name: str, mutation: Mutation) -> bytes:
    """Make a mutation in a file; what that held before.

    Raises:
        UsageError: the old text is not in it once.
    """
    before = path.read_bytes() if path.is_file() else b""
    if (count := before.count(mutation.old.encode())) != 1:
        raise UsageError(f"{name}: its old text is {count} times in {mutation.file}, and must be there once.")
    write(path, before.replace(mutation.old.encode(), mutation.new.encode()))
    return before


def write(path: Path, content: bytes) -> None:
    """Write a file of the copy, and forget what Python compiled of it."""
    path.write_bytes(content)
    # Python takes a file of the same size and the same second for the one that it compiled.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


@contextmanager
def mutated(copy: Path, name: str, mutation: Mutation) -> Iterator[None]:
    """The copy with a mutation."""
    before = change(copy / mutation.file, name, mutation)
    try:
        yield
    finally:
        write(copy / mutation.file, before)

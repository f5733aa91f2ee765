"""Our own files: what a tree has beside upstream's. They lie under ``fork/``, at the same paths."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping  # noqa: TC003 - a dataclass holds it
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import SeriesError
from scripts.source import build_inputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
COMMIT = "Files of the fork's own"  # the subject of their commit, between upstream's and the first patch's
_NO_SOURCE = "__pycache__"  # a folder that programs leave there


@dataclass(frozen=True)
class OwnFiles:
    """Files by their paths in the tree."""

    folder: Path | None = None
    contents: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of each."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.contents.items()}

    def place(self, name: str) -> Path:
        """Where one lies in this repository."""
        return (self.folder or Path("fork")) / name


def read(folder: Path | None) -> OwnFiles:
    """What lies in a folder; what programs leave there (:func:`is_left_by_programs`) is no part.

    Raises:
        SeriesError: a link, another thing that is no file, or a name that is no text.
    """
    if folder is None or not folder.is_dir():
        return OwnFiles(folder)
    found = sorted(_walk(folder), key=lambda path: path.relative_to(folder).as_posix())
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    return OwnFiles(folder, MappingProxyType(contents))


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if is_left_by_programs(path.name):
            continue
        if not path.name.isprintable():
            raise SeriesError(f"{folder}/{shown(path.name)}: a name is of printable UTF-8; rename it.")
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise SeriesError(f"{path} is no ordinary file; put the file itself there.")
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


def is_left_by_programs(name: str) -> bool:
    """Whether a file is none of ours wherever it lies: hidden, or in a cache of Python's.

    >>> [is_left_by_programs(name) for name in ("a/.b.py", ".a/b.py", "a/__pycache__/b.pyc", "a/b.c.py")]
    [True, True, True, False]
    """
    return any(part.startswith(".") or part == _NO_SOURCE for part in name.split("/"))


def shown(name: str) -> str:
    r"""A file's name for a message, whatever bytes it is of.

    >>> shown("ü.py"), shown("\udcff.py"), shown("a\nb.py")
    ('ü.py', "'\\udcff.py'", "'a\\nb.py'")
    """
    return name if name.isprintable() else ascii(name)


def is_ours_to_touch(name: str, package: str | None = None) -> bool:
    """Whether a patch may change, or ``fork/`` hold, this file; ``package``: of a python upstream.

    >>> names = "setup.py", "csrc/flash_attn/src/fork.h", "flash_attn/x.py"
    >>> [is_ours_to_touch(name) for name in (*names, "csrc/cutlass/include/a.h", "../x.py", "notes.txt")]
    [True, True, True, False, False, False]
    >>> [is_ours_to_touch(name) for name in ("flash_attn/.x.py", "flash_attn/__pycache__/x.py")]
    [False, False]
    """
    path = PurePosixPath(name)
    if is_left_by_programs(name) or not name.isprintable():
        return False
    if path.is_absolute() or ".." in path.parts or path.parts[:2] == ("csrc", "cutlass"):
        return False
    return build_inputs.is_package_input(path, package) if package else build_inputs.is_build_input(path)


def where_ours(package: str | None) -> str:
    """Which files those are, in words."""
    if package:
        return f"{package}/*.py and its pyproject.toml"
    return "setup.py, flash_attn/**.py, flash_attn_2_cuda/**.py and csrc/flash_attn/"


def naming(name: str) -> re.Pattern[str]:
    r"""What a line that includes, imports or calls one of our files says.

    >>> header, module = naming("csrc/flash_attn/src/fork_keys.h"), naming("flash_attn/determinism.py")
    >>> lines = '#include "fork_keys.h"', "fork_keys::tile(64)", "keys"
    >>> [header.search(line) is not None for line in lines]
    [True, True, False]
    >>> lines = "from .determinism import a", "from flash_attn.determinism import a", "a determinism"
    >>> [module.search(line) is not None for line in lines]
    [True, True, False]
    """
    path = PurePosixPath(name)
    words = [rf"\b{path.stem}\b"] if path.stem.startswith("fork_") else []
    if path.suffix != ".py":
        words.append(rf'(?<=["/]){re.escape(path.name)}(?=")')
    elif path.stem != "__init__":
        parent = re.escape(".".join(path.parent.parts))
        words.append(rf"(?<![\w.]){parent}\.{path.stem}\b|(?<=from \.){path.stem}(?= import)")
        words.append(rf"(?:(?<=from \. import )|(?<=from {parent} import ))(?:[\w, ]*\b)?{path.stem}\b")
    return re.compile("|".join(words or ["(?!)"]))


def misplaced(own: OwnFiles, package: str | None) -> list[str]:
    """The files that no build would read."""
    return [name for name in own.contents if not is_ours_to_touch(name, package)]


def require_no_others(own: OwnFiles, upstream: Iterable[str], package: str | None) -> None:
    """Refuse files that upstream has, or that no build reads.

    Raises:
        SeriesError: it names the first of them.
    """
    for name in misplaced(own, package):
        raise SeriesError(
            f"{own.place(name)} is no file that a build reads ({where_ours(package)}); move or delete it."
        )
    theirs = set(upstream)
    if both := sorted(own.contents.keys() & theirs):
        raise SeriesError(
            f"{own.place(both[0])}: upstream has a file {both[0]} too; give ours another name, or change "
            "upstream's in a patch."
        )
    for file, inside in ((theirs, own.contents), (own.contents.keys(), theirs)):
        for name in sorted(inside):
            if taken := next((str(above) for above in PurePosixPath(name).parents if str(above) in file), ""):
                which = name if name in own.contents else taken
                raise SeriesError(
                    f"{own.place(which)}: of {taken} and {name}, one is upstream's, and a file is no folder; "
                    "give ours another name."
                )


def lay(own: OwnFiles, root: Path) -> None:
    """Write them into a tree of upstream's files."""
    for name, content in own.contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@dataclass(frozen=True)
class Merged:
    """What becomes of ``fork/`` when a tree's own files are written back."""

    write: tuple[str, ...]  # changed in the tree
    remove: tuple[str, ...]  # gone there
    behind: tuple[str, ...]  # changed in fork/, and not in the tree
    both: tuple[str, ...]  # changed in both, and not to the same

    @property
    def changes(self) -> tuple[str, ...]:
        """All that differ."""
        return tuple(sorted((*self.write, *self.remove, *self.behind, *self.both)))


def merge(known: Mapping[str, str], here: Mapping[str, str], there: Mapping[str, str]) -> Merged:
    """Compare sha256 by name: when the tree was made, in ``fork/`` now, and in the tree now."""
    write, remove, behind, both = [], [], [], []
    for name in sorted(known.keys() | here.keys() | there.keys()):
        before, ours, theirs = known.get(name), here.get(name), there.get(name)
        if ours == theirs:
            continue
        if theirs == before:
            behind.append(name)
        elif ours != before:
            both.append(name)
        elif theirs is None:
            remove.append(name)
        else:
            write.append(name)
    return Merged(tuple(write), tuple(remove), tuple(behind), tuple(both))


def write_back(folder: Path, contents: Mapping[str, bytes], merged: Merged, here: Mapping[str, str]) -> None:
    """Write what a tree changed into ``fork/``, each file aside and renamed; empty folders go.

    Args:
        folder: where our own files lie.
        contents: the tree's, by their paths in it.
        merged: what is to be written and removed.
        here: the sha256 of the folder's files when that was found.

    Raises:
        SeriesError: something is in a file's place, and nothing was written; or a file was saved since.
    """
    require_room(folder, merged)
    for name in merged.remove:
        _require_unchanged(folder / name, here.get(name))
        remove(folder, name)
    for name in merged.write:
        path = folder / name
        if path.is_dir():  # what it held is gone by now
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_unchanged(path, here.get(name))
        files.write_bytes(path, contents[name])


def require_room(folder: Path, merged: Merged) -> None:
    """Refuse to write where a file that stays is in a folder's place, or a folder in a file's.

    Raises:
        SeriesError: it names what is there.
    """
    goes = {folder / name for name in merged.remove}
    for name in merged.write:
        path = folder / name
        above = [one for one in path.parents if one.is_relative_to(folder) and one.is_file()]
        below = [one for one in path.rglob("*") if not one.is_dir()] if path.is_dir() else []
        if there := sorted({*above, *below} - goes):
            raise SeriesError(f"{there[0]} is where {path} is to be written; move or delete it.")


def remove(folder: Path, name: str) -> None:
    """Delete a file below a folder, and the folders that are empty then."""
    path = folder / name
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
    remove_empty(folder, path)


def remove_empty(folder: Path, path: Path) -> None:
    """Delete the folders of a path below a folder that are empty."""
    for parent in path.parents:
        if parent == folder or (parent.is_dir() and any(parent.iterdir())):
            break
        if parent.is_dir():
            parent.rmdir()


def _require_unchanged(path: Path, sha256: str | None) -> None:
    now = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    if now != sha256:
        raise SeriesError(
            f"{path} was saved while it was to be written; it is left as it is. Run this again."
        )

"""The sources of kernel files, as bytes that go to another machine."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import archives, files

if TYPE_CHECKING:
    from scripts.series.tree import Snapshot

_FOLDERS = ("csrc/flash_attn", "csrc/cutlass/include")  # all that a kernel file can include
_NOT = {"flash_api.cpp", "core", "api"}  # the bindings' own


@dataclass(frozen=True)
class Packed:
    """Sources, and what they are known by."""

    sha256: str
    content: bytes


def pack(tree: Snapshot) -> Packed:
    """What a tree's kernel files are compiled from. The same files give the same bytes.

    Raises:
        SeriesError: a file was written meanwhile.
    """
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in sorted(path for folder in _FOLDERS for path in (tree.root / folder).rglob("*")):
            if path.is_file() and _NOT.isdisjoint(path.relative_to(tree.root).parts):
                content = path.read_bytes()
                entry = tarfile.TarInfo(path.relative_to(tree.root).as_posix())
                entry.size, entry.mode = len(content), 0o644
                archive.addfile(entry, io.BytesIO(content))
    tree.check_unchanged()
    content = packed.getvalue()
    return Packed(hashlib.sha256(content).hexdigest(), content)


def unpacked(packed: Packed, folder: Path) -> Path:
    """The folder with the sources: unpacked there once, aside and renamed."""
    root = folder / f"sources-{packed.sha256[:16]}" / "source"
    with files.in_turn(folder / f"sources-{packed.sha256[:16]}.lock", "unpacks sources"):
        if not root.is_dir():
            root.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root.parent) as aside:
                work = Path(aside) / "source"
                with tarfile.open(fileobj=io.BytesIO(packed.content), mode="r:gz") as archive:
                    archives.write_all(archive, work)
                work.replace(root)
    return root

"""Files of tar archives, written below a folder.

``TarFile.extract`` takes a filter since Python 3.10.12 and 3.11.4. Debian 12 has 3.11.2; without a filter a
file keeps an owner, a mode and a place that an archive made up.
"""

from __future__ import annotations

import shutil
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from scripts.base.errors import BuildError

if TYPE_CHECKING:
    import tarfile
    from pathlib import Path


def write(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, name: str | None = None) -> None:
    """Write one file of an archive, with mode 644.

    Args:
        tar: the archive.
        member: its entry.
        folder: below which the file goes.
        name: its path there (default: the entry's).

    Raises:
        BuildError: the entry is no file, or lies outside the folder.
    """
    place = PurePosixPath(name or member.name)
    is_outside = place.is_absolute() or ".." in place.parts
    content = None if is_outside or not member.isfile() else tar.extractfile(member)
    if content is None:
        raise BuildError(f"{place} of an archive is no ordinary file below its folder.")
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, path.open("wb") as file:
        shutil.copyfileobj(content, file)
    path.chmod(0o644)


def write_all(tar: tarfile.TarFile, folder: Path) -> None:
    """Write every file of an archive; see :func:`write`."""
    for member in tar:
        if not member.isdir():
            write(tar, member, folder)

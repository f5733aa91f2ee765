"""Bring a file that is known by its sha256: written aside, checked, then renamed."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import files

if TYPE_CHECKING:
    from unearth.fetchers import PyPIClient


class OtherContentError(Exception):
    """What came is not what was to come; nothing was kept."""

    def __init__(self, digest: str) -> None:
        super().__init__(digest)
        self.digest = digest


def sha256(path: Path) -> str:
    """The digest of a file's content, as hex digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch(client: PyPIClient, url: str, destination: Path, expected: str) -> None:
    """Download ``url`` to ``destination``.

    Args:
        client: of pip's settings (:meth:`scripts.base.pip.PipConfig.client`).
        url: where it is.
        destination: the file, whose folder exists.
        expected: the sha256 of its content.

    Raises:
        OtherContentError: the content is another; its ``digest`` says which.
        httpx2.HTTPError, OSError: it did not come, or could not be written.
    """
    descriptor, name = tempfile.mkstemp(dir=destination.parent, prefix=destination.name, suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file, client.get_stream(url) as response:
            response.raise_for_status()
            for block in response.iter_bytes():
                with files.writing(destination):
                    file.write(block)
        if (digest := sha256(part)) != expected:
            raise OtherContentError(digest)
        part.replace(destination)
    finally:
        part.unlink(missing_ok=True)

"""The sdist of upstream that the package index has: fetched, checked against the pin, and read."""

from __future__ import annotations

import gzip
import io
import tarfile
from typing import TYPE_CHECKING, cast

import httpx2
from unearth.errors import UnpackError

from scripts.base import archives, console
from scripts.base.errors import UpstreamError
from scripts.base.fetch import OtherContentError, fetch, sha256
from scripts.base.pip import PipConfig
from scripts.source import build_inputs
from scripts.source.matrix_tables import UNKNOWN

if TYPE_CHECKING:
    from pathlib import Path

    from unearth.fetchers import Fetcher

    from scripts.source.matrix_tables import Upstream


def _download(pin: Upstream, destination: Path, config: PipConfig) -> None:
    """Fetch the sdist beside its destination, check it, then rename it into place."""
    what = f"{pin.distribution} {pin.version}"
    with config.client() as session:
        # The client is a Fetcher in all but the types of arguments that we do not pass.
        finder = config.finder(cast("Fetcher", session), pin.distribution)
        try:
            match = finder.find_best_match(
                f"{pin.distribution}=={pin.version}", allow_prereleases=True, allow_yanked=True
            )
            if match.best is None:
                raise UpstreamError(
                    f"the package index has no sdist of {what}. Looked at pip's configured indexes and "
                    "find-links (pip config list); check the network, or initialise the submodule and use "
                    "--source git."
                )
            fetch(session, match.best.link.normalized, destination, pin.sdist_sha256)
        except OtherContentError as e:
            raise UpstreamError(
                f"the sdist of {what} has sha256 {e.digest}, the pin says {pin.sdist_sha256} "
                "(sdist-sha256 in wheel_matrix.toml). It was not kept. "
                "A download that was cut off, a mirror that changes files, or a wrong pin."
            ) from e
        except (httpx2.HTTPError, OSError, UnpackError) as e:
            raise UpstreamError(
                f"could not fetch the sdist of {what}: {e or type(e).__name__}. "
                "Check the network, or use --source git."
            ) from e


def fetched(pin: Upstream, cache: Path, config: PipConfig | None = None) -> Path:
    """The pinned sdist in the cache; fetched when it is not there or not what the pin says."""
    if pin.sdist_sha256 == UNKNOWN:
        raise UpstreamError(
            f"the pin has no sdist of {pin.version} (sdist-sha256 in wheel_matrix.toml); use --source git."
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UpstreamError(
            f"{cache}: cannot make the cache folder: {e.strerror}. XDG_CACHE_HOME says where caches lie."
        ) from e
    path = cache / f"{pin.distribution}-{pin.version}-{pin.sdist_sha256[:16]}.tar.gz"
    if path.exists() and sha256(path) != pin.sdist_sha256:
        console.warn(f"{path} is damaged; fetching it again.")
        path.unlink()
    if not path.exists():
        console.note(f"fetching the sdist of {pin.distribution} {pin.version} from the package index")
        _download(pin, path, config or PipConfig.read())
    return path


def extract(archive: Path, target: Path, package: str | None = None) -> None:
    """Write what a build needs of an sdist into a folder.

    The sdist of a python upstream is flat; its files go where ``package`` lies in the repository.
    """
    place = f"{package}/" if package else ""
    # Unpacked in memory (some 110 MB): files are taken in another order than the archive's, and seeking in
    # gzip is slow.
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive.read_bytes()))) as tar:
        members = {place + m.name.partition("/")[2]: m for m in tar.getmembers() if m.isfile()}
        for name in build_inputs.select(members, package):
            archives.write(tar, members[name], target, name)


def read(archive: Path, name: str) -> bytes:
    """One file of an sdist."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.partition("/")[2] == name and (content := tar.extractfile(member)) is not None:
                return content.read()
    raise UpstreamError(f"{archive.name} has no {name}.")

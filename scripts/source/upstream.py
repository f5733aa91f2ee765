"""Bring the pinned source of upstream, from the submodule or from the package index, and check it.

Both give the same files: what a build needs of the release, chosen by one rule (``is_build_input``).
"""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

import httpx2
from unearth.errors import UnpackError

from scripts.base import console, files, layout
from scripts.base.errors import UpstreamError
from scripts.base.fetch import OtherContentError, fetch, sha256
from scripts.base.git import Repository
from scripts.base.pip import PipConfig
from scripts.source.matrix_tables import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from unearth.fetchers import Fetcher

    from scripts.source.matrix_tables import Upstream

CUTLASS = "csrc/cutlass"
_IN_SDIST = (
    ".cu",
    ".h",
    ".cuh",
    ".cpp",
    ".hpp",
    ".py",
)  # of csrc, what upstream's MANIFEST.in names; git has more (.inl)


class Source(str, Enum):
    """Where the source comes from."""

    GIT = "git"
    SDIST = "sdist"
    AUTO = "auto"


@dataclass(frozen=True)
class Checkout:
    """Upstream's files, checked against the pin."""

    source: Source
    why: str
    extract: Callable[[Path], None]
    read: Callable[[str], bytes]  # a file of upstream's repository, whether a build needs it or not


def is_build_input(path: PurePosixPath, packages: frozenset[PurePosixPath] | None = None) -> bool:
    """Whether a build needs this file. ``packages``: the folders that are Python packages; None: any may be one."""
    if path.parts[:2] == ("csrc", "flash_attn") or path.parts[:3] == ("csrc", "cutlass", "include"):
        return path.suffix in _IN_SDIST
    if path.parts[0] == "flash_attn":
        return path.suffix == ".py" and (packages is None or path.parent in packages)
    return str(path) in ("setup.py", "README.md", "LICENSE", "AUTHORS", "MANIFEST.in")


def _select(paths: Iterable[str]) -> list[str]:
    pure = [PurePosixPath(p) for p in paths]
    packages = frozenset(p.parent for p in pure if p.name == "__init__.py")
    return sorted(str(p) for p in pure if is_build_input(p, packages))


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Write a file, with one mode: some are executable in an archive and not in the other, and the mode is part of a commit."""
    member.mode = 0o644
    tar.extract(member, target, filter="data")


# --- the submodule ---


def submodule_state(pin: Upstream, folder: Path) -> str | None:
    """Why the submodule cannot be used, or None when it can."""
    if UNKNOWN in (pin.commit, pin.cutlass):
        return f"the pin has no commit for {pin.version} (commit, cutlass in wheel_matrix.toml)"
    command = "git submodule update --init upstream && git -C upstream submodule update --init csrc/cutlass"
    repository = Repository(folder, UpstreamError)
    if not repository.is_top_level():
        return f"the submodule {folder.name} is not initialised (to use git: {command})"
    head = repository.run("rev-parse", "HEAD", writes=False).strip()
    if head != pin.commit:
        return f"the submodule {folder.name} is at {head}, the pin is {pin.commit} ({pin.tag}) (git submodule update upstream)"
    cutlass = Repository(folder / CUTLASS, UpstreamError)
    if not cutlass.is_top_level():
        return (
            f"{folder.name}/{CUTLASS} is not initialised (git -C upstream submodule update --init {CUTLASS})"
        )
    head = cutlass.run("rev-parse", "HEAD", writes=False).strip()
    if head != pin.cutlass:
        return f"{folder.name}/{CUTLASS} is at {head}, the pin is {pin.cutlass} (git -C upstream submodule update {CUTLASS})"
    return None


def _extract_git(folder: Path, target: Path, commit: str, cutlass_commit: str) -> None:
    """Copy the committed files: local changes in the submodule do not reach a build."""
    repository, cutlass = Repository(folder, UpstreamError), Repository(folder / CUTLASS, UpstreamError)
    paths = repository.files(commit) + [f"{CUTLASS}/{p}" for p in cutlass.files(cutlass_commit, "include")]
    selected = _select(paths)
    chosen = frozenset(selected)
    own = [p for p in selected if not p.startswith(CUTLASS + "/")]
    for repo, prefix, revision, names in (
        (repository, "", commit, own),
        (cutlass, CUTLASS + "/", cutlass_commit, ["include"]),
    ):
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            archive = Path(temporary) / "tree.tar"
            repo.run(
                "archive",
                "--format=tar",
                f"--prefix={prefix}",
                f"--output={archive}",
                revision,
                "--",
                *names,
                writes=False,
            )
            with tarfile.open(archive) as tar:
                for member in tar:
                    if member.name in chosen:
                        _extract(tar, member, target)


# --- the package index ---


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
                    f"the package index has no sdist of {what}. Looked at pip's configured indexes and find-links (pip config list); "
                    "check the network, or initialise the submodule and use --source git."
                )
            fetch(session, match.best.link.normalized, destination, pin.sdist_sha256)
        except OtherContentError as e:
            raise UpstreamError(
                f"the sdist of {what} has sha256 {e.digest}, the pin says {pin.sdist_sha256} (sdist-sha256 in wheel_matrix.toml). "
                "It was not kept. A download that was cut off, a mirror that changes files, or a wrong pin."
            ) from e
        except (httpx2.HTTPError, OSError, UnpackError) as e:
            raise UpstreamError(
                f"could not fetch the sdist of {what}: {e or type(e).__name__}. Check the network, or use --source git."
            ) from e


def sdist(pin: Upstream, cache: Path, config: PipConfig | None = None) -> Path:
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


def _extract_sdist(archive: Path, target: Path) -> None:
    # Unpacked in memory (some 110 MB): files are taken in another order than the archive's, and seeking in gzip is slow.
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive.read_bytes()))) as tar:
        members = {m.name.partition("/")[2]: m for m in tar.getmembers() if m.isfile()}
        for name in _select(members):
            member = members[name]
            member.name = name
            _extract(tar, member, target)


def _read_sdist(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.partition("/")[2] == name and (content := tar.extractfile(member)) is not None:
                return content.read()
    raise UpstreamError(f"{archive.name} has no {name}.")


# --- either ---


def from_git(folder: Path, why: str, commit: str, cutlass: str) -> Checkout:
    """The files of a commit of the submodule, with the cutlass headers of another."""
    repository = Repository(folder, UpstreamError)
    return Checkout(
        Source.GIT,
        why,
        lambda target: _extract_git(folder, target, commit, cutlass),
        lambda name: repository.read(f"{commit}:{name}"),
    )


def from_sdist(pin: Upstream, cache: Path, why: str) -> Checkout:
    """The files of a release's sdist."""
    archive = sdist(pin, cache)
    return Checkout(
        Source.SDIST,
        why,
        lambda target: _extract_sdist(archive, target),
        lambda name: _read_sdist(archive, name),
    )


def find(pin: Upstream, folder: Path, cache: Path, source: Source = Source.AUTO) -> Checkout:
    """Choose the source and check it against the pin.

    Args:
        pin: the release.
        folder: the submodule's folder.
        cache: where sdists are kept.
        source: ``AUTO`` takes the submodule where it is usable and says why where it is not.

    Raises:
        UpstreamError: the source asked for cannot be had, or is not what the pin says.
    """
    if source is not Source.SDIST:
        unusable = submodule_state(pin, folder)
        if unusable is None:
            return from_git(folder, f"the submodule is at {pin.tag}", pin.commit, pin.cutlass)
        if source is Source.GIT:
            raise UpstreamError(f"--source git: {unusable}.")
        why = unusable
    else:
        why = "--source sdist"
    return from_sdist(pin, cache, why)


def _edited(folder: Path) -> str:
    """The first files that were changed in the submodule or its cutlass, in words; empty for none."""
    names = [
        f"{prefix}{line[3:]}"
        for path, prefix in ((folder, ""), (folder / CUTLASS, f"{CUTLASS}/"))
        for line in Repository(path, UpstreamError)
        .run("status", "--porcelain", "--ignore-submodules=all", writes=False)
        .splitlines()
    ]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def pinned(pin: Upstream, source: Source) -> Checkout:
    """The release that this repository pins, telling where it comes from."""
    console.step(f"Upstream {pin.version}")
    checkout = find(pin, layout.UPSTREAM, layout.cache("sdist"), source)
    console.note(f"from {checkout.source.value}: {checkout.why}")
    if checkout.source is Source.GIT and (edited := _edited(layout.UPSTREAM)):
        console.warn(
            f"{layout.UPSTREAM.name} has changes that are not committed ({edited}); they are not built. "
            "A change belongs into a patch: make it in build/source, commit it there, and nox -s export."
        )
    return checkout


def materialise(checkout: Checkout, target: Path) -> None:
    """Write upstream's files into ``target``, which is replaced, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=target.name + "."))
    try:
        with files.writing(target):
            checkout.extract(unfinished)
        if not (unfinished / CUTLASS / "include/cutlass/cutlass.h").is_file():
            raise UpstreamError("upstream's source has no cutlass headers in csrc/cutlass/include.")
        shutil.rmtree(target, ignore_errors=True)
        unfinished.chmod(0o755)
        unfinished.replace(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

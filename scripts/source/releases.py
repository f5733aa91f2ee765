"""Other releases of upstream: a version on the package index, a tag or a commit, as a pin and its files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import httpx2
import tomlkit
from packaging.version import InvalidVersion, Version
from unearth.errors import UnpackError

from scripts.base import console, pip
from scripts.base.errors import UpstreamError
from scripts.base.git import Repository
from scripts.source import commit_names, upstream
from scripts.source.build_inputs import CUTLASS
from scripts.source.matrix_tables import UNKNOWN, Upstream

if TYPE_CHECKING:
    from pathlib import Path

    from unearth.fetchers import Fetcher

    from scripts.source.matrix import Matrix

LATEST = "latest"


@dataclass(frozen=True)
class Release:
    """A release and its files."""

    pin: Upstream
    checkout: upstream.Checkout
    how: str  # where the hash or the commit is known from

    @property
    def name(self) -> str:
        """As a user names it."""
        return self.pin.version


def on_index(distribution: str) -> dict[str, str | None]:
    """The versions that the package index has an sdist of, oldest first, each with its sha256."""
    config = pip.PipConfig.read()
    with config.client() as session:
        try:
            packages = config.finder(cast("Fetcher", session), distribution).find_all_packages(distribution)
        except (httpx2.HTTPError, OSError, UnpackError) as e:
            raise UpstreamError(
                f"could not list the releases of {distribution}: {e or type(e).__name__}. Check the network."
            ) from e
        sha256_by_version = {
            p.version: (p.link.hash_option or {}).get("sha256", [None])[0]
            for p in packages
            if p.version and not p.link.is_wheel
        }
    return dict(sorted(sha256_by_version.items(), key=lambda item: Version(item[0])))


def _sdist(matrix: Matrix, version: str, sha256: str, how: str, cache: Path) -> Release:
    known = matrix.upstream
    if version == known.version:
        pin = known
    else:
        changes = {
            "version": version,
            "tag": _tag(known, version),
            "commit": UNKNOWN,
            "cutlass": None if known.cutlass is None else UNKNOWN,
            "sdist_sha256": sha256,
        }
        pin = known.model_copy(update=changes)
    return Release(pin, upstream.from_sdist(pin, cache, how), how)


def _tag(known: Upstream, version: str) -> str:
    """The tag of another release, made as the known one is; unknown where that does not tell."""
    if known.tag is None:  # a commit that is no release, which only upstream's own package can be pinned to
        return f"v{version}"
    prefix, found, rest = known.tag.partition(known.version)
    return f"{prefix}{version}" if found and not rest else UNKNOWN


def _cutlass(repository: Repository, name: str, commit: str) -> str:
    """The commit of cutlass that a release needs, fetched where it is not there."""
    folder = repository.root
    entry = repository.run("ls-tree", commit, CUTLASS, writes=False).split()
    if entry[:1] != ["160000"]:
        raise UpstreamError(
            f"{name} of {folder.name} has no submodule {CUTLASS}; the series cannot be moved there."
        )
    cutlass = entry[2]
    headers = Repository(folder / CUTLASS, UpstreamError)
    if not headers.is_top_level():
        raise UpstreamError(
            f"{folder.name}/{CUTLASS} is not initialised (git -C upstream submodule update --init {CUTLASS})."
        )
    if _commit(headers, [cutlass]) is None:
        headers.attempt("fetch", "--quiet", "origin", cutlass)
        if _commit(headers, [cutlass]) is None:
            raise UpstreamError(
                f"{name} needs cutlass {cutlass}, which the remote of {headers.root} does not give."
            )
    return cutlass


def _from_git(matrix: Matrix, name: str, folder: Path) -> Release | None:
    """A tag or commit of the submodule, fetched where it is not there; None when there is no such thing."""
    repository = Repository(folder, UpstreamError)
    if not repository.is_top_level():
        return None
    candidates = [name, _tag(matrix.upstream, name), *filter(None, [commit_names.commit_in(name)])]
    resolved = _commit(repository, candidates)
    if resolved is None:
        console.note(f"{name} is not in the submodule; fetching its remote's tags")
        repository.attempt("fetch", "--quiet", "--tags", "origin")
        resolved = _commit(repository, candidates)
    if resolved is None and re.fullmatch("[0-9a-f]{40}", name):
        repository.attempt("fetch", "--quiet", "origin", name)
        resolved = _commit(repository, candidates)
    if resolved is None:
        return None
    found, commit = resolved
    known = matrix.upstream
    cutlass = None if known.cutlass is None else _cutlass(repository, name, commit)
    version, tag = _named_in_git(repository, known, name, commit)
    sha256 = UNKNOWN
    if tag is not None:
        sha256 = matrix.releases.get(version) or on_index(known.distribution).get(version) or UNKNOWN
    changes = {"version": version, "tag": tag, "commit": commit, "cutlass": cutlass, "sdist_sha256": sha256}
    how = f"{found} of the submodule, commit {commit[:12]}"
    pin = known.model_copy(update=changes)
    return Release(pin, upstream.from_git(pin, folder, how), how)


def _named_in_git(repository: Repository, known: Upstream, name: str, commit: str) -> tuple[str, str | None]:
    """The version of a commit, and its tag if it is a release: what its package says, or setuptools-scm."""
    if known.package is None:
        text = repository.read(f"{commit}:flash_attn/__init__.py").decode("utf-8")
        version = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
        if version is None:
            raise UpstreamError(f"{name}: flash_attn/__init__.py has no __version__.")
        return commit_names.named(repository, commit, version[1])
    text = repository.read(f"{commit}:{known.package}/pyproject.toml").decode("utf-8")
    scm = tomlkit.parse(text).unwrap().get("tool", {}).get("setuptools_scm", {})
    pattern = scm.get("tag_regex", "v(?P<version>.+)")
    tags = repository.run("tag", "--points-at", commit, writes=False).split()
    for found in (re.fullmatch(pattern, tag) for tag in tags):
        if found is not None:
            return str(Version(found["version"])), found.string
    raise UpstreamError(
        f"{name}: no tag of commit {commit[:12]} gives a version (tag_regex in "
        f"{known.package}/pyproject.toml); name a tag."
    )


def _commit(repository: Repository, names: list[str]) -> tuple[str, str] | None:
    for name in names:
        status, out, _ = repository.attempt("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if status == 0:
            return name, out.strip()
    return None


def find(
    matrix: Matrix, name: str, folder: Path, cache: Path, source: upstream.Source = upstream.Source.AUTO
) -> Release:
    """The release that a user names.

    Args:
        matrix: the pin and the known releases.
        name: a version, ``latest`` (asks the index), a tag or a commit (of the submodule).
        folder: the submodule's folder.
        cache: where sdists are kept.
        source: ``AUTO`` takes the submodule where it has the release.

    Raises:
        UpstreamError: there is no such release, or it cannot be had.
    """
    distribution = matrix.upstream.distribution
    if name == LATEST:
        # A release in the making follows releases in the making.
        any_kind = Version(matrix.upstream.version).is_prerelease
        listed = [v for v in on_index(distribution) if any_kind or not Version(v).is_prerelease]
        if not listed:
            raise UpstreamError(f"the package index has no sdist of {distribution}.")
        name = listed[-1]
        console.note(f"latest is {name}")
    if source is not upstream.Source.SDIST:
        release = _from_git(matrix, name, folder)
        if release is not None:
            return release
        if source is upstream.Source.GIT:
            raise UpstreamError(
                f"--source git: the submodule {folder.name} is not initialised, or neither it nor its remote "
                f"has {name}."
            )
    return _by_version(matrix, name, cache)


def _by_version(matrix: Matrix, name: str, cache: Path) -> Release:
    """A release from its sdist: the pin's, one of the matrix, or one that the package index lists."""
    distribution = matrix.upstream.distribution
    try:
        version = str(Version(name))
    except InvalidVersion as e:
        raise UpstreamError(
            f"{name!r} is no version, and tags and commits need the submodule "
            "(git submodule update --init upstream) and a remote that has them."
        ) from e
    if version == matrix.upstream.version:
        return _sdist(matrix, version, matrix.upstream.sdist_sha256, "the pin", cache)
    if version in matrix.releases:
        return _sdist(matrix, version, matrix.releases[version], "the sha256 in wheel_matrix.toml", cache)
    listed = on_index(distribution)
    if version not in listed:
        newest = list(listed)[-8:]
        raise UpstreamError(
            f"the package index has no sdist of {distribution} {version}; "
            f"the newest of its {len(listed)} are {', '.join(newest)}."
        )
    sha256 = listed[version]
    if sha256 is None:
        raise UpstreamError(
            f"the package index gives no sha256 for {distribution} {version}; "
            f"put its hash into [upstreams.{matrix.name}.releases] of wheel_matrix.toml after looking at the "
            "file."
        )
    return _sdist(matrix, version, sha256, "the sha256 that the package index gives", cache)

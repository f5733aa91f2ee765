"""Bring the pinned source of upstream, from the submodule or from the package index, and check it.

Both give the same files: what a build needs of the release (``build_inputs``).
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import archives, console, files, layout
from scripts.base.errors import UpstreamError
from scripts.base.git import Repository
from scripts.source import build_inputs, sdist
from scripts.source.build_inputs import CUTLASS
from scripts.source.matrix_tables import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable

    from scripts.source.matrix_tables import Upstream


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


# --- the submodule ---


def submodule_state(pin: Upstream, folder: Path) -> str | None:
    """Why the submodule cannot be used, or None when it can."""
    if UNKNOWN in (pin.commit, pin.cutlass):
        keys = "commit, cutlass" if pin.cutlass else "commit"
        return f"the pin has no commit for {pin.version} ({keys} in wheel_matrix.toml)"
    return _compiled_state(pin, folder) if pin.package is None else _package_state(pin, folder)


def _compiled_state(pin: Upstream, folder: Path) -> str | None:
    """The same of a compiled upstream, whose pin's commit the submodule is at."""
    command = "git submodule update --init upstream && git -C upstream submodule update --init csrc/cutlass"
    repository = Repository(folder, UpstreamError)
    if not repository.is_top_level():
        return f"the submodule {folder.name} is not initialised (to use git: {command})"
    head = repository.run("rev-parse", "HEAD", writes=False).strip()
    if head != pin.commit:
        update, named = "git submodule update upstream", pin.tag or pin.version
        return f"the submodule {folder.name} is at {head}, the pin is {pin.commit} ({named}) ({update})"
    cutlass = Repository(folder / CUTLASS, UpstreamError)
    if not cutlass.is_top_level():
        return (
            f"{folder.name}/{CUTLASS} is not initialised (git -C upstream submodule update --init {CUTLASS})"
        )
    head = cutlass.run("rev-parse", "HEAD", writes=False).strip()
    if head != pin.cutlass:
        update = f"git -C upstream submodule update {CUTLASS}"
        return f"{folder.name}/{CUTLASS} is at {head}, the pin is {pin.cutlass} ({update})"
    return None


def _package_state(pin: Upstream, folder: Path) -> str | None:
    """The same of a python upstream, whose commit need only be there.

    The submodule stays at the commit of another's pin.
    """
    repository = Repository(folder, UpstreamError)
    if not repository.is_top_level():
        return f"the submodule {folder.name} is not initialised (git submodule update --init upstream)"
    if repository.attempt("cat-file", "-e", f"{pin.commit}^{{commit}}")[0] != 0:
        return f"the submodule {folder.name} lacks commit {pin.commit} (git -C upstream fetch --tags)"
    return None


def _extract_package(folder: Path, target: Path, commit: str, package: str) -> None:
    """Copy the committed files of a python upstream's package."""
    repository = Repository(folder, UpstreamError)
    chosen = build_inputs.select(repository.files(commit, "--", package), package)
    _copy(repository, target, commit, ("", chosen), frozenset(chosen))


def _extract_git(folder: Path, target: Path, commit: str, cutlass_commit: str) -> None:
    """Copy the committed files: local changes in the submodule do not reach a build."""
    repository, cutlass = Repository(folder, UpstreamError), Repository(folder / CUTLASS, UpstreamError)
    paths = repository.files(commit) + [f"{CUTLASS}/{p}" for p in cutlass.files(cutlass_commit, "include")]
    selected = build_inputs.select(paths)
    chosen = frozenset(selected)
    own = [p for p in selected if not p.startswith(CUTLASS + "/")]
    _copy(repository, target, commit, ("", own), chosen)
    _copy(cutlass, target, cutlass_commit, (f"{CUTLASS}/", ["include"]), chosen)


def _copy(
    repository: Repository, target: Path, commit: str, what: tuple[str, list[str]], chosen: frozenset[str]
) -> None:
    """Copy the chosen files of a commit; ``what``: where they go, and the paths to look at."""
    prefix, names = what
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        archive = Path(temporary) / "tree.tar"
        options = ("--format=tar", f"--prefix={prefix}", f"--output={archive}")
        repository.run("archive", *options, commit, "--", *names, writes=False)
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.name in chosen:
                    archives.write(tar, member, target)


# --- either ---


def from_git(pin: Upstream, folder: Path, why: str) -> Checkout:
    """The files of a pin's commit of the submodule, with the cutlass headers of another where it has them."""
    repository = Repository(folder, UpstreamError)

    def extract(target: Path) -> None:
        if pin.package is not None:
            _extract_package(folder, target, pin.commit, pin.package)
        else:
            _extract_git(folder, target, pin.commit, pin.cutlass or UNKNOWN)

    return Checkout(Source.GIT, why, extract, lambda name: repository.read(f"{pin.commit}:{name}"))


def from_sdist(pin: Upstream, cache: Path, why: str) -> Checkout:
    """The files of a release's sdist."""
    archive = sdist.fetched(pin, cache)
    flat = f"{pin.package}/" if pin.package else ""  # what its sdist leaves out of names
    return Checkout(
        Source.SDIST,
        why,
        lambda target: sdist.extract(archive, target, pin.package),
        lambda name: sdist.read(archive, name.removeprefix(flat)),
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
            return from_git(pin, folder, f"the submodule has {pin.tag or pin.version}")
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
        if Repository(path, UpstreamError).is_top_level()
        for line in Repository(path, UpstreamError)
        .run("status", "--porcelain", "--ignore-submodules=all", writes=False)
        .splitlines()
    ]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def pinned(pin: Upstream, source: Source) -> Checkout:
    """The release that this repository pins, telling where it comes from."""
    console.step(f"Upstream {pin.distribution} {pin.version}")
    checkout = find(pin, layout.UPSTREAM, layout.cache("sdist"), source)
    console.note(f"from {checkout.source.value}: {checkout.why}")
    if checkout.source is Source.GIT and (edited := _edited(layout.UPSTREAM)):
        console.warn(
            f"{layout.UPSTREAM.name} has changes that are not committed ({edited}); they are not built. "
            "A change belongs into a patch: make it in the work tree that nox -s apply makes, commit it "
            "there, and nox -s export."
        )
    return checkout


def require_whole(pin: Upstream, folder: Path) -> None:
    """Refuse upstream's files without what every build of its kind needs."""
    needed = f"{pin.package}/__init__.py" if pin.package else f"{CUTLASS}/include/cutlass/cutlass.h"
    if not (folder / needed).is_file():
        what = f"no {needed}" if pin.package else f"no cutlass headers in {CUTLASS}/include"
        raise UpstreamError(f"upstream's source has {what}.")


def materialise(pin: Upstream, checkout: Checkout, target: Path) -> None:
    """Write upstream's files into ``target``, which is replaced, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=target.name + "."))
    try:
        with files.writing(target):
            checkout.extract(unfinished)
        require_whole(pin, unfinished)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.chmod(0o755)
        unfinished.replace(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

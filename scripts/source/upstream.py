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

from scripts.base import console, files, layout
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
        return f"the pin has no commit for {pin.version} (commit, cutlass in wheel_matrix.toml)"
    command = "git submodule update --init upstream && git -C upstream submodule update --init csrc/cutlass"
    repository = Repository(folder, UpstreamError)
    if not repository.is_top_level():
        return f"the submodule {folder.name} is not initialised (to use git: {command})"
    head = repository.run("rev-parse", "HEAD", writes=False).strip()
    if head != pin.commit:
        update = "git submodule update upstream"
        return f"the submodule {folder.name} is at {head}, the pin is {pin.commit} ({pin.tag}) ({update})"
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


def _extract_git(folder: Path, target: Path, commit: str, cutlass_commit: str) -> None:
    """Copy the committed files: local changes in the submodule do not reach a build."""
    repository, cutlass = Repository(folder, UpstreamError), Repository(folder / CUTLASS, UpstreamError)
    paths = repository.files(commit) + [f"{CUTLASS}/{p}" for p in cutlass.files(cutlass_commit, "include")]
    selected = build_inputs.select(paths)
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
                        build_inputs.extract(tar, member, target)


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
    archive = sdist.fetched(pin, cache)
    return Checkout(
        Source.SDIST,
        why,
        lambda target: sdist.extract(archive, target),
        lambda name: sdist.read(archive, name),
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
            return from_git(folder, f"the submodule is at {pin.tag}", pin.commit, pin.cutlass or "")
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

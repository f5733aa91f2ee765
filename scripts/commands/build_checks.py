"""Options of ``build`` that do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.base import layout
from scripts.base.errors import UpstreamError, UsageError
from scripts.source import upstream

if TYPE_CHECKING:
    import argparse

    from scripts.source.matrix import Matrix
    from scripts.wheels.building.jobs import Job

_NOT_OF_ARCHIVES = ("stock", "python", "kernels_only", "containers", "image", "base_version", "sign")


def check(loaded: Matrix, jobs: list[Job], options: argparse.Namespace) -> None:
    """Refuse what cannot be done together.

    Raises:
        UpstreamError: the submodule is asked for and not initialised.
        UsageError: two options exclude each other; the message says which to leave out.
    """
    if options.source is upstream.Source.GIT and (
        unusable := upstream.submodule_state(loaded.upstream, layout.UPSTREAM)
    ):
        raise UpstreamError(f"--source git: {unusable}.")
    if options.cpp:
        _check_archive(options)
    if options.stock and len(jobs) > 1:
        raise UsageError("--stock makes one file whatever the target; choose one target.")
    if options.scheduler and (options.stock or options.containers):
        raise UsageError("--scheduler compiles wheels' kernel files; leave out --stock and --containers.")
    _check_containers(options)
    if options.python and not options.stock:
        raise UsageError("--python is for --stock: a wheel serves every Python.")
    for name in ("sign", "base_version"):
        if getattr(options, name) and (options.stock or options.kernels_only):
            raise UsageError(
                f"--{name.replace('_', '-')} is for wheels; leave out --stock and --kernels-only."
            )
    if options.kernels_only and (options.stock or options.check_reproducible):
        raise UsageError("--kernels-only makes no wheel; leave out --stock and --check-reproducible.")


def _check_archive(options: argparse.Namespace) -> None:
    if mistaken := [name for name in _NOT_OF_ARCHIVES if getattr(options, name)]:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in mistaken)
        raise UsageError(f"--cpp makes an archive, no wheel; leave out {names}.")


def _check_containers(options: argparse.Namespace) -> None:
    if options.containers and (
        options.stock
        or options.check_reproducible
        or options.kernels_only
        or options.source is upstream.Source.GIT
    ):
        raise UsageError(
            "--containers makes wheels from the sdist; leave out --stock, --check-reproducible, "
            "--kernels-only and --source git."
        )
    if options.image and not options.containers:
        raise UsageError("--image is for --containers.")

"""``build`` of a python upstream: one wheel, for which most of build's options mean nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.table import Table

from scripts.base import console, layout
from scripts.base.errors import UpstreamError, UsageError
from scripts.base.fetch import sha256
from scripts.source import upstream
from scripts.wheels.building import build
from scripts.wheels.packing import python_wheel
from scripts.wheels.trust import evidence

if TYPE_CHECKING:
    import argparse

    from scripts.source.matrix import Matrix

# By where argparse puts them.
_FOREIGN = ("target", "all", "python", "kernels", "arch", "jobs", "no_cache")
_FOREIGN_RESULTS = ("stock", "cpp", "kernels_only", "containers", "image")


def run(loaded: Matrix, options: argparse.Namespace) -> None:
    """Build what the options say, or tell what would be built."""
    asked = [name for name in (*_FOREIGN, *_FOREIGN_RESULTS) if getattr(options, name)]
    if asked:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise UsageError(
            f"{names}: {loaded.name} is Python alone, and has one wheel for every target; leave that out."
        )
    source = options.source
    if source is upstream.Source.GIT and (
        unusable := upstream.submodule_state(loaded.upstream, layout.UPSTREAM)
    ):
        raise UpstreamError(f"--source git: {unusable}.")
    if options.list or options.dry_run:
        table = Table("upstream", "wheel", "compiles")
        table.add_row(loaded.name, python_wheel.file_name(loaded), "nothing; kernels are at their first use")
        console.out.print(table)
        return
    started = time.monotonic()
    path = python_wheel.build(loaded, source, layout.BUILD, options.out.resolve())
    taken = console.duration(time.monotonic() - started)
    console.done(f"{path}  {path.stat().st_size / 1e6:.1f} MB  {taken}")
    console.note(f"sha256 {sha256(path)}")
    if options.check_reproducible:
        build.again_same(path, lambda folder: python_wheel.build(loaded, source, folder, folder / "dist"))
    if options.sign:
        evidence.attest_build(path, sign=True)

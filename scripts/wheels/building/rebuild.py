"""Build a wheel again from what it says of itself, as a second builder, and compare byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from scripts.base import console, layout
from scripts.base.errors import UsageError, VerifyError
from scripts.series import clone, ground
from scripts.source import kernel_set, matrix, upstream
from scripts.wheels.building import build
from scripts.wheels.building.jobs import Job
from scripts.wheels.packing import python_wheel
from scripts.wheels.proof import origin
from scripts.wheels.proof.verify import Facts
from scripts.wheels.trust import sbom

if TYPE_CHECKING:
    from scripts.wheels.building.build import BuildOptions
    from scripts.wheels.trust.contents import Contents


def rebuild(wheel: Contents, options: BuildOptions) -> None:
    """Build it from nothing, in a folder of its own.

    Raises:
        UsageError: this checkout has another upstream, series or target than the wheel was built from.
        WheelError: the bytes are others; diffoscope says where, where it is installed.
    """
    loaded = _upstream(wheel)
    _require_series(wheel, loaded)
    for name, version in sbom.compilers(wheel.facts):
        console.note(f"it was made with {name}: {version}")
    if loaded.table.kind == "python":
        build.again_same(
            wheel.path, lambda folder: python_wheel.build(loaded, options.source, folder, folder / "dist")
        )
        return
    job = job_of(wheel, loaded)
    build.again_same(
        wheel.path,
        lambda folder: (
            build.build_one(loaded, job, options, build.Place(folder, folder / "dist", cache=False)).path
        ),
    )


def _upstream(wheel: Contents) -> matrix.Matrix:
    """The matrix as the wheel's upstream sees it."""
    every = matrix.load(layout.MATRIX)
    loaded = every.making(wheel.distribution)
    if loaded is None:
        raise UsageError(
            f"{wheel.path.name}: {layout.MATRIX.name} has no upstream whose distribution is "
            f"{wheel.distribution}; it has {', '.join(m.upstream.distribution for m in every.each())}."
        )
    _require_same(wheel, "upstream", wheel.facts["upstream"]["version"], loaded.upstream.version)
    _require_same(wheel, "revision", wheel.facts["fork_revision"], loaded.table.revision)
    return loaded


def _require_same(wheel: Contents, what: str, told: object, here: object) -> None:
    if told != here:
        raise UsageError(
            f"{wheel.path.name}: its {what} is {told}, and {layout.MATRIX.name} of this checkout has {here}; "
            f"check out the commit that it was built from{_where(wheel)}."
        )


def _where(wheel: Contents) -> str:
    """Which state of this repository that is, where one is."""
    try:
        facts = Facts(wheel.path, wheel.provenance)
        found = origin.check_series(facts, layout.ROOT, layout.cache("sdist"))
    except VerifyError:
        return " (no commit here has its series)"
    return f" ({found.where})"


def _require_series(wheel: Contents, loaded: matrix.Matrix) -> None:
    """The checkout's patches, in their order, are the wheel's."""
    patches = clone.series(loaded)
    told = wheel.provenance.series
    here = [(patch.name, patch.sha256) for patch in patches.patches]
    same = here == [(patch.name, patch.sha256) for patch in told.patches]
    if same and told.own_files == patches.own.digests:
        return
    checkout = upstream.pinned(loaded.upstream, upstream.Source.AUTO)
    digest = patches.digest(ground.base_of(loaded.upstream, checkout, patches.own))
    _require_same(
        wheel,
        "series",
        f"{told.digest[:16]}… of {len(told.patches)} patches and {len(told.own_files)} own files",
        f"{digest[:16]}… of {len(here)} and {len(patches.own.contents)}",
    )


def job_of(wheel: Contents, loaded: matrix.Matrix) -> Job:
    """What was asked for when it was built: target, kernels and architectures."""
    facts = wheel.facts
    target = loaded.named(facts["target"])
    for key, here in (("cuda", target.cuda), ("torch", target.reference_torch)):
        if key in facts:
            _require_same(wheel, key, facts[key], here)
    named = {kernel.name: kernel for kernel in kernel_set.ALL_KERNELS}
    kernels = tuple(replace(named[name], bias=facts["attn_bias"]) for name in facts["kernel_set"])
    return Job(target, kernels, tuple(facts["architectures"]))

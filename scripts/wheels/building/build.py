"""Build wheels: which, then compile, link and pack each; rebuild one from nothing and compare."""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
import subprocess
import tarfile
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.base import console, layout
from scripts.base.errors import BuildError, UsageError, WheelError
from scripts.base.process import last_lines
from scripts.series import clone
from scripts.source import kernel_set, matrix, upstream
from scripts.wheels.building import containers
from scripts.wheels.compiling import kernels, ninja
from scripts.wheels.packing import link_and_pack, linking, metadata
from scripts.wheels.toolchain import compilers
from scripts.wheels.trust import evidence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from scripts.wheels.building.jobs import Job

# The patch that lets a build choose kernels, and does no more: what stock's extension has of the series.
CHOOSES_KERNELS = "Build-a-chosen-set-of-kernels-and-say-what-is-missing"


@dataclass(frozen=True)
class BuildOptions:
    """How wheels are built, whichever they are."""

    source: upstream.Source
    jobs: int | None = None  # compilers at once; None: by cores and memory
    stock: bool = False  # upstream's kernels as a bare extension, in the place of a wheel
    cpp: bool = False  # the C++ API's archive, in the place of a wheel
    python: str | None = None  # that stock's extension is for; None: the one running
    sign: bool = False  # the statement of how each wheel was built


@dataclass(frozen=True)
class Built:
    """One wheel, archive or bare extension that was built."""

    path: Path
    size: int
    sha256: str
    seconds: float
    compiled: ninja.Compiled


@dataclass(frozen=True)
class Place:
    """Where a build works: trees, objects and logs; the wheel; with a compile cache or not."""

    build: Path
    out: Path
    cache: bool


def _toolchain(job: Job, *, cache: bool, python: str | None = None) -> compilers.Toolchain:
    tools = compilers.assemble(job.target, python, layout.BUILD, cache=cache)
    console.note(f"nvcc {tools.toolkit.version}: {tools.toolkit.why}")
    console.note(f"C++ compiler {tools.cxx}: {tools.cxx_version}")
    return tools


def _compile(plan: kernels.Plan, units: list[kernels.Unit], jobs: int | None) -> ninja.Compiled:
    compiled = ninja.compile_units(plan, units, jobs)
    console.note(
        f"{compiled.built} compiled in {console.duration(compiled.seconds)}; compile cache: "
        f"{compiled.cache_hits} hits, {compiled.cache_misses} misses"
    )
    return compiled


def kernels_only(loaded: matrix.Matrix, job: Job, options: BuildOptions, place: Place) -> None:
    """Compile the kernel files; builds of wheels find them."""
    _, applied = clone.apply(loaded, options.source)
    kernel_set.require_known(applied.root)
    console.step(f"Toolchain for the kernels of {job.target.name}")
    plan = kernels.Plan(
        applied,
        _toolchain(job, cache=place.cache),
        job.kernels,
        job.architectures,
        place.build,
        shared_ptx=loaded.shared_ptx,
    )
    console.step(f"Kernel files: {len(plan.kernels)}, for {', '.join('sm_' + a for a in plan.architectures)}")
    done = _compile(plan, kernels.kernel_units(plan), options.jobs)
    console.done(f"{len(done.objects)} objects in {done.objects[0].parent}")


def build_one(loaded: matrix.Matrix, job: Job, options: BuildOptions, place: Place) -> Built:
    """One wheel, the archive of its C++ API, or stock's bare extension."""
    build, out = place.build, place.out
    started = time.monotonic()
    if options.stock:
        patches, applied = clone.apply(loaded, options.source, build / "stock-source", only=CHOOSES_KERNELS)
    else:
        patches, applied = clone.apply(loaded, options.source, build / "source")
    kernel_set.require_known(applied.root)
    python = (options.python or compilers.running_python()) if options.stock else None
    console.step(f"Toolchain for {job.target.name}" + (f", Python {python}" if python else ""))
    tools = _toolchain(job, cache=place.cache, python=python)
    linking.require_shared_libstdcxx(tools)
    if options.cpp:
        linking.require_static_runtime(tools)
    flavour = kernels.STOCK if options.stock else kernels.FORK
    plan = kernels.Plan(applied, tools, job.kernels, job.architectures, build, flavour, loaded.shared_ptx)
    console.step(
        f"Kernel files: {len(plan.kernels)}, for {', '.join('sm_' + a for a in plan.architectures)}; "
        "and the binding"
    )
    compiled = _compile(plan, [*kernels.binding_units(plan), *kernels.kernel_units(plan)], options.jobs)
    facts = {} if options.stock else metadata.provenance(loaded, job.target, patches, plan)
    made = link_and_pack.Made(loaded, job.target, plan, compiled.objects, facts)
    pack = link_and_pack.archive if options.cpp else link_and_pack.wheel_of
    path = (link_and_pack.stock if options.stock else pack)(made, out)
    content = path.read_bytes()
    built = Built(
        path, len(content), hashlib.sha256(content).hexdigest(), time.monotonic() - started, compiled
    )
    console.done(f"{path}  {built.size / 1e6:.1f} MB  {console.duration(built.seconds)}")
    console.note(f"sha256 {built.sha256}")
    return built


@contextmanager
def _other_settings() -> Iterator[None]:
    """Settings of another user's: what they change in a wheel is a defect."""
    before = dict(os.environ)
    mask = os.umask(0o077)
    os.environ.update(TZ="Pacific/Kiritimati", LC_ALL="C")
    os.environ.pop("SOURCE_DATE_EPOCH", None)
    try:
        yield
    finally:
        os.umask(mask)
        os.environ.clear()
        os.environ.update(before)


def _rebuild(loaded: matrix.Matrix, job: Job, options: BuildOptions, built: Built) -> None:
    """Build once more from nothing (no objects, no compile cache), in another folder; compare byte for byte.

    Torch's environment alone is shared: pip made it, we do not. An interrupted check keeps what it compiled
    for the next.
    """
    again_same(
        built.path, lambda folder: build_one(loaded, job, options, Place(folder, folder / "dist", False)).path
    )


def again_same(path: Path, build: Callable[[Path], Path]) -> None:
    """Build a wheel once more in a folder of its own, with another user's settings.

    Raises:
        WheelError: its bytes are others.
    """
    folder = layout.BUILD / "check-reproducible"
    console.step(f"Building again from nothing, in {folder}")
    started = time.monotonic()
    with _other_settings():
        again = build(folder)
    if not filecmp.cmp(path, again, shallow=False):
        raise WheelError(
            f"{path} is not what a build from nothing gives ({again}):\n{_difference(path, again)}"
        )
    shutil.rmtree(folder)
    taken = console.duration(time.monotonic() - started)
    console.done(f"{path.name}: byte for byte the same, from nothing in {taken}")


def _difference(ours: Path, theirs: Path) -> str:
    """Which files differ between two wheels; where it is installed, diffoscope's account of how."""
    names, program = _differing(ours, theirs), shutil.which("diffoscope")
    what = "    " + (", ".join(names) or "the archive itself, not what is in it")
    if not program:
        return f"{what} (pip install diffoscope shows more)"
    # The archive's own tables differ wherever a file does: hundreds of lines.
    quiet = ["--exclude-command=^zipdetails"] if names else []
    command = [program, "--text=-", *quiet, str(ours), str(theirs)]
    shown = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return f"{what}\n{last_lines(shown.stdout or shown.stderr, 100)}"


def _differing(ours: Path, theirs: Path) -> list[str]:
    """The files of two wheels, or archives, that are not in both, or differ."""
    if tarfile.is_tarfile(ours):
        with tarfile.open(ours) as a, tarfile.open(theirs) as b:
            return sorted({name for name, _ in _members(a) ^ _members(b)})
    if not zipfile.is_zipfile(ours):
        return ["the extension"]
    with zipfile.ZipFile(ours) as a, zipfile.ZipFile(theirs) as b:
        return [
            n
            for n in sorted({*a.namelist(), *b.namelist()})
            if n not in a.namelist() or n not in b.namelist() or a.read(n) != b.read(n)
        ]


def _members(archive: tarfile.TarFile) -> set[tuple[str, bytes]]:
    """Each entry's name, with its header and content."""
    found = set()
    for entry in archive:
        content = archive.extractfile(entry) if entry.isfile() else None
        found.add((entry.name, repr(entry.get_info()).encode() + (content.read() if content else b"")))
    return found


def made(loaded: matrix.Matrix, job: Job) -> set[kernel_set.Kernel]:
    """The kernels of a job whose objects are there."""
    applied, tools = clone.standing(loaded), compilers.present(job.target, layout.BUILD)
    if applied is None or tools is None:
        return set()
    units = kernels.kernel_units(
        kernels.Plan(
            applied, tools, job.kernels, job.architectures, layout.BUILD, shared_ptx=loaded.shared_ptx
        )
    )
    return {
        k for k in job.kernels if any(unit.target.stem == k.name and unit.target.exists() for unit in units)
    }


def build_all(
    loaded: matrix.Matrix, jobs: list[Job], options: BuildOptions, place: Place, *, check_reproducible: bool
) -> list[Built | BuildError]:
    """Build one after the other; a failure stops no other. A single one raises it."""

    def build(job: Job) -> Built:
        built = build_one(loaded, job, options, place)
        if check_reproducible:
            _rebuild(loaded, job, options, built)
        if options.sign:
            evidence.attest_build(built.path, sign=True)
        return built

    if len(jobs) == 1:
        return [build(jobs[0])]
    results: list[Built | BuildError] = []
    for job in jobs:
        try:
            results.append(build(job))
        except BuildError as e:
            console.error(f"{job.target.name}: {e}")
            results.append(e)
    return results


def in_containers(
    loaded: matrix.Matrix, jobs: list[Job], options: BuildOptions, place: Place, asked_image: str | None
) -> list[BuildError]:
    """One container a target. Returns what failed; a failure stops no other."""
    failed: list[BuildError] = []
    for first in jobs:
        name = first.target.name
        words = [
            "--target",
            name,
            "--kernels",
            ",".join(kernel_set.spell_kernels(first.kernels)),
            "--arch",
            ",".join(first.architectures),
        ]
        words += [
            "--source",
            "sdist",
            *(["--jobs", str(options.jobs)] if options.jobs else []),
            *([] if place.cache else ["--no-cache"]),
            *(["--base-version", loaded.base_version] if loaded.base_version else []),
        ]
        try:
            image = asked_image or loaded.images.get(first.target.cuda)
            if image is None:
                raise UsageError(
                    f"[images] of {loaded.path.name} has none for CUDA {first.target.cuda}; "
                    "name one with --image."
                )
            request = containers.Request(first.target, tuple(words), image)
            for path in containers.build(request, layout.ROOT, place.build / "containers", place.out):
                evidence.attest_build(path, sign=options.sign)  # repaired: inside, it had other bytes
                console.done(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
                console.note(f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
        except BuildError as e:
            console.error(f"{name}: {e}")
            failed.append(e)
    return failed

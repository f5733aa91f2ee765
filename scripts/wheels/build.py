"""Build the wheels that the command line asks for: plan, compile, link, pack, sum up; and rebuild one from nothing to compare."""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import shutil
import subprocess
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts import maintain
from scripts.base import console, layout
from scripts.base.errors import BuildError, UpstreamError, UsageError, WheelError
from scripts.base.process import last_lines
from scripts.series import clone
from scripts.source import kernel_set, matrix, upstream
from scripts.wheels import compiling, containers, image, kernels, toolchain, wheel, workflow

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Once(argparse.Action):
    """An option that may be given once: argparse takes the last of several without a word."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option_string: str | None = None) -> None:
        seen: set[str] = namespace.__dict__.setdefault("_seen", set())
        if self.dest in seen:
            parser.error(f"{option_string} is given twice")
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


def positive(text: str) -> int:
    """A number that an option counts with."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def kernel_choice(text: str) -> tuple[kernel_set.Kernel, ...]:
    """The kernels that an option names."""
    try:
        return kernel_set.parse_kernels(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def _pythons(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if unknown := [word for word in words if word not in matrix.PYTHONS and words != ("all",)]:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: choose from {', '.join(matrix.PYTHONS)}, or 'all'")
    return words


def architectures(text: str) -> tuple[str, ...]:
    """The compute capabilities that an option names, in order."""
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in matrix.ARCHITECTURES]:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: choose from {', '.join(matrix.ARCHITECTURES)} (90 is an H100 or H200)")
    return tuple(sorted(set(words), key=lambda a: (len(a), a)))


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    existing = next(p for p in (path, *path.parents) if p.exists())
    if not existing.is_dir():
        raise argparse.ArgumentTypeError(f"{existing} is a file, not a folder")
    if not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"{existing} cannot be written to")
    return path


def _list(loaded: matrix.Matrix) -> None:
    table = Table("target", "CUDA", "torch", "Python", "arch", "kernels", "wheel version")
    for target in loaded.targets:
        name = target.name + (" (default)" if target.default else "")
        table.add_row(
            name,
            target.cuda,
            target.torch,
            ", ".join(target.pythons),
            ", ".join(target.architectures),
            f"{len(target.kernels)} of {len(kernel_set.ALL_KERNELS)}",
            loaded.version(target),
        )
    console.out.print(table)


@dataclass(frozen=True)
class Job:
    """One wheel to build."""

    target: matrix.Target
    python: str
    kernels: tuple[kernel_set.Kernel, ...]
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class Built:
    """One wheel that was built."""

    path: Path
    size: int
    sha256: str
    seconds: float
    compiled: compiling.Compiled


@dataclass(frozen=True)
class Place:
    """Where a build works: trees, objects and logs; the wheel; with a compile cache or not."""

    build: Path
    out: Path
    cache: bool


def _toolchain(job: Job, python: str | None, *, cache: bool) -> toolchain.Toolchain:
    tools = toolchain.assemble(job.target, python, layout.BUILD, cache=cache)
    console.note(f"nvcc {tools.toolkit.version}: {tools.toolkit.why}")
    console.note(f"C++ compiler {tools.cxx}: {tools.cxx_version}")
    return tools


def _compile(plan: kernels.Plan, units: list[kernels.Unit], jobs: int | None) -> compiling.Compiled:
    compiled = compiling.compile_units(plan, units, jobs)
    console.note(
        f"{compiled.built} compiled in {console.duration(compiled.seconds)}; compile cache: {compiled.cache_hits} hits, {compiled.cache_misses} misses"
    )
    return compiled


def _kernels_only(loaded: matrix.Matrix, job: Job, options: argparse.Namespace) -> None:
    """Compile the kernel files, which need neither torch nor Python; builds of wheels find them."""
    _, applied = clone.apply(loaded, options.source)
    console.step(f"Toolchain for the kernels of {job.target.name}")
    plan = kernels.Plan(
        applied, _toolchain(job, None, cache=not options.no_cache), job.kernels, job.architectures, layout.BUILD, shared_ptx=loaded.shared_ptx
    )
    console.step(f"Kernel files: {len(plan.kernels)}, for {', '.join('sm_' + a for a in plan.architectures)}")
    done = _compile(plan, kernels.kernel_units(plan), options.jobs)
    console.done(f"{len(done.objects)} objects in {done.objects[0].parent}")


def build_one(loaded: matrix.Matrix, job: Job, options: argparse.Namespace, place: Place) -> Built:
    """One wheel, or stock's bare extension."""
    build, out = place.build, place.out
    started = time.monotonic()
    if options.stock:  # the first patch alone, which lets a build choose kernels and no more
        patches, applied = clone.apply(loaded, options.source, build / "stock-source", count=1)
    else:
        patches, applied = clone.apply(loaded, options.source, build / "source")
    console.step(f"Toolchain for {job.target.name}, Python {job.python}")
    tools = _toolchain(job, job.python, cache=place.cache)
    console.note(f"torch {tools.environment.torch}")
    flavour = kernels.STOCK if options.stock else kernels.FORK
    plan = kernels.Plan(applied, tools, job.kernels, job.architectures, build, flavour, loaded.shared_ptx)
    console.step(f"Kernel files: {len(plan.kernels)}, for {', '.join('sm_' + a for a in plan.architectures)}; and the binding")
    binding = kernels.binding_unit(plan)
    compiled = _compile(plan, [binding, *kernels.kernel_units(plan)], options.jobs)
    extension = binding.target.parent / f"{flavour.extension}-{kernels.extension_key(compiled.objects, wheel.link_options(tools))}.so"
    if not extension.exists():
        console.step("Linking")
        wheel.link(tools, compiled.objects, extension, build / "logs" / "link.log")
    if options.stock:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{flavour.extension}.cpython-{tools.environment.tag[2:]}-x86_64-linux-gnu.so"
        shutil.copyfile(extension, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    else:
        facts = wheel.provenance(loaded, job.target, patches, plan)
        path = wheel.pack(loaded, job.target, plan, extension, facts, notice=layout.ROOT / "NOTICE", dist=out)
    content = path.read_bytes()
    built = Built(path, len(content), hashlib.sha256(content).hexdigest(), time.monotonic() - started, compiled)
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


def _rebuild(loaded: matrix.Matrix, job: Job, options: argparse.Namespace, built: Built) -> None:
    """Build once more from nothing (no objects, no compile cache), in another folder; compare byte for byte.

    Torch's environment alone is shared: pip made it, we do not. An interrupted check keeps what it compiled for the next.
    """
    folder = layout.BUILD / "check-reproducible"
    console.step(f"Building again from nothing, in {folder}")
    with _other_settings():
        again = build_one(loaded, job, options, Place(folder, folder / "dist", cache=False))
    if again.sha256 != built.sha256:
        raise WheelError(f"{built.path} is not what a build from nothing gives ({again.path}):\n{_difference(built.path, again.path)}")
    shutil.rmtree(folder)
    console.done(f"{built.path.name}: byte for byte the same, from nothing in {console.duration(again.seconds)}")


def _difference(ours: Path, theirs: Path) -> str:
    """What differs between two wheels: diffoscope's account where that is installed, else the names of the files."""
    program = shutil.which("diffoscope")
    if program:
        shown = subprocess.run([program, "--text=-", str(ours), str(theirs)], capture_output=True, text=True, errors="replace", check=False)
        return last_lines(shown.stdout or shown.stderr, 100)
    if not zipfile.is_zipfile(ours):
        return "    the extension differs (pip install diffoscope shows where)"
    with zipfile.ZipFile(ours) as a, zipfile.ZipFile(theirs) as b:
        names = [n for n in sorted({*a.namelist(), *b.namelist()}) if n not in a.namelist() or n not in b.namelist() or a.read(n) != b.read(n)]
    return f"    {', '.join(names) or 'the archive itself, not what is in it'} (pip install diffoscope shows more)"


def _jobs(loaded: matrix.Matrix, options: argparse.Namespace) -> list[Job]:
    """What the options ask for: each target with each Python."""
    if options.all:
        targets = loaded.targets
    elif options.target is None:
        targets = (loaded.default(),)
    else:
        targets = tuple(t for t in loaded.targets if fnmatch.fnmatchcase(t.name, options.target)) or (loaded.named(options.target),)
    jobs = []
    for target in targets:
        wanted = target.pythons if options.python == ("all",) else options.python or (None,)
        for version in wanted:
            try:
                python = toolchain.check_python(target, version)
            except UsageError as e:
                if len(targets) == 1:
                    raise
                console.warn(f"left out: {e}")
                continue
            if mistake := matrix.too_early(target.cuda, options.arch or ()):
                raise UsageError(f"--arch: {mistake}; target {target.name} is for CUDA {target.cuda}.")
            jobs.append(Job(target, python, options.kernels or target.kernels, options.arch or target.architectures))
    if not jobs:
        raise UsageError("no target has the Python that was asked for.")
    return jobs


def _made(loaded: matrix.Matrix, job: Job) -> set[kernel_set.Kernel]:
    """The kernels of a job whose objects are there."""
    applied, tools = clone.standing(loaded), toolchain.present(job.target, layout.BUILD)
    if applied is None or tools is None:
        return set()
    units = kernels.kernel_units(kernels.Plan(applied, tools, job.kernels, job.architectures, layout.BUILD, shared_ptx=loaded.shared_ptx))
    return {k for k in job.kernels if any(unit.target.stem == k.name and unit.target.exists() for unit in units)}


def _plan(loaded: matrix.Matrix, jobs: list[Job], *, stock: bool, inside: bool) -> None:
    """Say what builds will take, before the first, in containers (``inside``) or here. Kernels serve every Python and torch of one toolkit."""
    table = Table("target", "Python", "makes", "kernel files", "there by then", "to compile", "arch", "CPU time, nothing cached")
    seen: dict[tuple[str, tuple[str, ...]], set[kernel_set.Kernel]] = {}
    for job in jobs:
        key = (job.target.cuda, job.architectures)
        there = set() if stock else seen.get(key, set()) | _made(loaded, job)
        fresh = set(job.kernels) - there
        seen[key] = there | fresh
        compiles = f"{len(fresh)} and the binding" if fresh else "the binding"
        if not inside and toolchain.out_of_reach(job.target):
            compiles += f"; needs CUDA {job.target.cuda} or --containers"
        seconds = sum(kernels.seconds_expected(k, job.architectures, loaded.shared_ptx) for k in fresh)
        table.add_row(
            job.target.name,
            job.python,
            kernels.STOCK.extension if stock else f"flash_attn {loaded.version(job.target)}",
            str(len(job.kernels)),
            str(len(job.kernels) - len(fresh)),
            compiles,
            ", ".join(job.architectures),
            console.duration(seconds + 40),
        )
    console.out.print(table)


def _summary(jobs: list[Job], results: list[Built | BuildError]) -> None:
    table = Table("target", "Python", "wheel", "MB", "sha256", "seconds", "compiled, of which cached")
    for job, result in zip(jobs, results, strict=True):
        if isinstance(result, BuildError):
            table.add_row(job.target.name, job.python, "failed: " + str(result).splitlines()[0], "", "", "", "")
            continue
        done = result.compiled
        lookups = done.cache_hits + done.cache_misses
        cached = f"{done.built}, {100 * done.cache_hits // lookups} %" if lookups else str(done.built)
        table.add_row(
            job.target.name, job.python, result.path.name, f"{result.size / 1e6:.1f}", result.sha256[:16] + "…", f"{result.seconds:.0f}", cached
        )
    console.out.print(table)


def _build_all(loaded: matrix.Matrix, jobs: list[Job], options: argparse.Namespace) -> list[Built | BuildError]:
    """Build one after the other; a failure stops no other. A single one raises it."""
    place = Place(layout.BUILD, options.out.resolve(), not options.no_cache)

    def build(job: Job) -> Built:
        built = build_one(loaded, job, options, place)
        if options.check_reproducible:
            _rebuild(loaded, job, options, built)
        return built

    if len(jobs) == 1:
        return [build(jobs[0])]
    results: list[Built | BuildError] = []
    for job in jobs:
        try:
            results.append(build(job))
        except BuildError as e:
            console.error(f"{job.target.name}, Python {job.python}: {e}")
            results.append(e)
    _summary(jobs, results)
    return results


def _in_containers(loaded: matrix.Matrix, jobs: list[Job], options: argparse.Namespace) -> None:
    """One container a target: its kernels once, then a wheel for each Python."""
    by_target: dict[str, list[Job]] = {}
    for job in jobs:
        by_target.setdefault(job.target.name, []).append(job)
    failed: list[BuildError] = []
    for name, group in by_target.items():
        first = group[0]
        words = ["--target", name, "--kernels", ",".join(kernel_set.spell_kernels(first.kernels)), "--arch", ",".join(first.architectures)]
        words += ["--source", "sdist", *(["--jobs", str(options.jobs)] if options.jobs else []), *(["--no-cache"] if options.no_cache else [])]
        try:
            image = options.image or loaded.images.get(first.target.cuda)
            if image is None:
                raise UsageError(f"[images] of {loaded.path.name} has none for CUDA {first.target.cuda}; name one with --image.")
            request = containers.Request(first.target, tuple(job.python for job in group), tuple(words), image)
            for path in containers.build(request, layout.ROOT, layout.BUILD / "containers", options.out.resolve()):
                console.done(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
                console.note(f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
        except BuildError as e:
            console.error(f"{name}: {e}")
            failed.append(e)
    if failed:
        raise SystemExit(failed[0].exit_code)


def _matrix(options: argparse.Namespace) -> None:
    loaded = matrix.load(layout.MATRIX)
    if not (options.github or options.check):
        _list(loaded)
    elif options.check:
        workflow.check(layout.ROOT, workflow.render(loaded))
        console.done(f"{workflow.PATH} is what {loaded.path.name} says.")
    else:
        written = workflow.write(layout.ROOT, workflow.render(loaded))
        console.done(f"{workflow.PATH} written." if written else f"{workflow.PATH} was up to date.")


def _image(options: argparse.Namespace) -> None:
    interpreters = [
        toolchain.find_python(version) for version in (matrix.PYTHONS if options.python == ("all",) else options.python or ("3.12", "3.13"))
    ]
    console.done(f"{image.make_image(interpreters, layout.BUILD / 'containers', options.mirror)}; next: nox -s build -- --containers --image NAME")


def _check(loaded: matrix.Matrix, jobs: list[Job], options: argparse.Namespace) -> None:
    """Options that do not go together."""
    if options.source is upstream.Source.GIT and (unusable := upstream.submodule_state(loaded.upstream, layout.UPSTREAM)):
        raise UpstreamError(f"--source git: {unusable}.")
    if options.stock and len(jobs) > 1:
        raise UsageError("--stock makes one file whatever the target; choose one target and one Python.")
    if options.containers and (options.stock or options.check_reproducible or options.kernels_only or options.source is upstream.Source.GIT):
        raise UsageError("--containers makes wheels from the sdist; leave out --stock, --check-reproducible, --kernels-only and --source git.")
    if options.image and not options.containers:
        raise UsageError("--image is for --containers.")
    if options.kernels_only and (options.stock or options.check_reproducible):
        raise UsageError("--kernels-only makes no wheel; leave out --stock and --check-reproducible.")


def _build(options: argparse.Namespace) -> None:
    loaded = matrix.load(layout.MATRIX)
    if options.list:
        _list(loaded)
        return
    jobs = _jobs(loaded, options)
    _check(loaded, jobs, options)
    if options.dry_run or len(jobs) > 1:
        _plan(loaded, jobs, stock=options.stock, inside=options.containers)
    if options.dry_run:
        for name in sorted({k.source for job in jobs for k in job.kernels}):
            console.note(name)
        return
    free = shutil.disk_usage(layout.ROOT).free
    if free < 8e9:
        console.warn(f"{free / 1e9:.0f} GB are free here; a first build takes about 8 GB, most of it for torch.")
    if options.containers:
        _in_containers(loaded, jobs, options)
        return
    if options.kernels_only:
        for job in {(j.target.cuda, j.target.toolkit, j.kernels, j.architectures): j for j in jobs}.values():
            _kernels_only(loaded, job, options)
        return
    if failed := [r for r in _build_all(loaded, jobs, options) if isinstance(r, BuildError)]:
        raise SystemExit(failed[0].exit_code)
    if not options.stock:
        console.note("next: nox -s verify, on a machine with a GPU")


def add_command(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    build = commands.add_parser(
        "build", help="build wheels into dist/", description="Build wheels into dist/. An interrupted build goes on where it stopped."
    )
    which = build.add_mutually_exclusive_group()
    which.add_argument(
        "--target",
        action=_Once,
        metavar="NAME",
        help="the target to build, or a glob such as 'cu130-*' (default: the one marked in wheel_matrix.toml)",
    )
    which.add_argument("--all", action="store_true", help="build every target")
    which.add_argument("--list", action="store_true", help="list the targets and stop")
    build.add_argument(
        "--python",
        action=_Once,
        metavar="X.Y,…",
        type=_pythons,
        help="the Pythons to build for, or 'all' of a target's (default: the one running this)",
    )
    build.add_argument(
        "--kernels",
        action=_Once,
        metavar="SET",
        type=kernel_choice,
        help="'all', or some of hdim64,…,fp16,bf16,fwd,split,bwd,causal,full; 'no-bias' leaves attn_mask and attn_bias out (default: the target's)",
    )
    build.add_argument("--arch", action=_Once, metavar="CC,…", type=architectures, help="compute capabilities, such as 80,90 (default: the target's)")
    build.add_argument("--jobs", action=_Once, metavar="N", type=positive, help="compilers at once (default: by cores and memory)")
    maintain.add_source(build)
    build.add_argument("--no-cache", action="store_true", help="do without the compile cache")
    build.add_argument("--stock", action="store_true", help="build unpatched kernels as a bare extension, to measure against (tests/wheel/bench.py)")
    build.add_argument(
        "--kernels-only", action="store_true", help="compile the kernel files and stop; wheels of any torch and Python take them from there"
    )
    build.add_argument("--containers", action="store_true", help="build through cibuildwheel, in a container per target: manylinux wheels")
    build.add_argument("--image", action=_Once, metavar="NAME", help="with --containers: the image (default: [images] of wheel_matrix.toml)")
    build.add_argument("--out", action=_Once, metavar="DIR", type=_folder, default=layout.DIST, help="where wheels go (default: dist/)")
    build.add_argument(
        "--check-reproducible", action="store_true", help="build each once more, from nothing and elsewhere, and compare byte for byte"
    )
    build.add_argument("--dry-run", action="store_true", help="say what would be done and stop")
    table = commands.add_parser("matrix", help="list the targets, or render the workflow that builds them", description="List the targets.")
    table.add_argument("--github", action="store_true", help=f"write {workflow.PATH}: a job for each target")
    table.add_argument("--check", action="store_true", help="write nothing; fail when the workflow is stale")
    table.set_defaults(run=_matrix, interrupted="interrupted; nothing was changed.")
    image = commands.add_parser(
        "image",
        help="make an image for --containers where no registry can be reached",
        description="Make an image for --containers from Debian's packages and this machine's CPythons. Needs root, debootstrap and podman.",
    )
    image.add_argument("--python", metavar="X.Y,…", type=_pythons, help="the CPythons to take over, from PATH or pyenv (default: 3.12,3.13)")
    image.add_argument("--mirror", metavar="URL", help="Debian's mirror (default: debootstrap's)")
    image.set_defaults(run=_image, interrupted="interrupted; no image was made.")
    build.set_defaults(run=_build, interrupted="interrupted. What was finished is kept: the same command goes on from there.")

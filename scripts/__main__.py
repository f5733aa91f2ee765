"""The command line: ``python -m scripts COMMAND``. The sessions of noxfile.py call it."""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from scripts import console, kernels, maintain, matrix, toolchain, upstream, verify, wheel
from scripts.errors import BuildError, UpstreamError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = maintain.ROOT


class _Once(argparse.Action):
    """An option that may be given once: argparse takes the last of several without a word."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option_string: str | None = None) -> None:
        seen: set[str] = namespace.__dict__.setdefault("_seen", set())
        if self.dest in seen:
            parser.error(f"{option_string} is given twice")
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _kernel_choice(text: str) -> tuple[matrix.Kernel, ...]:
    try:
        return matrix.parse_kernels(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def _pythons(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if unknown := [word for word in words if word not in matrix.PYTHONS and words != ("all",)]:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: choose from {', '.join(matrix.PYTHONS)}, or 'all'")
    return words


def _architectures(text: str) -> tuple[str, ...]:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nox -s", description="Build and prove deterministic FlashAttention wheels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

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
        type=_kernel_choice,
        help="'all', or some of hdim64,…,fp16,bf16,fwd,split,bwd,causal,full (default: the target's)",
    )
    build.add_argument(
        "--arch", action=_Once, metavar="CC,…", type=_architectures, help="compute capabilities, such as 80,90 (default: the target's)"
    )
    build.add_argument("--jobs", action=_Once, metavar="N", type=_positive, help="compilers at once (default: by cores and memory)")
    maintain.add_source(build)
    build.add_argument("--no-cache", action="store_true", help="do without the compile cache")
    build.add_argument("--stock", action="store_true", help="build unpatched kernels as a bare extension, to measure against (tests/wheel/bench.py)")
    build.add_argument("--out", action=_Once, metavar="DIR", type=_folder, default=ROOT / "dist", help="where wheels go (default: dist/)")
    build.add_argument("--dry-run", action="store_true", help="say what would be done and stop")

    check = commands.add_parser(
        "verify",
        help="prove wheels",
        description="Prove wheels on the GPU of this machine; the proof is written beside each. Exit status 3: not verified, no GPU.",
    )
    check.add_argument("wheels", metavar="WHEEL", type=Path, nargs="*", help="default: every wheel in dist/")
    check.add_argument("--pytest", metavar="ARGUMENT", action="append", default=[], help="pass an argument to pytest; no proof is kept then")

    build.set_defaults(run=_build, interrupted="interrupted. What was finished is kept: the same command goes on from there.")
    check.set_defaults(run=_verify, interrupted="interrupted; no proof was written.")
    maintain.add_commands(commands)
    return parser


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
            f"{len(target.kernels)} of {len(matrix.ALL_KERNELS)}",
            loaded.version(target),
        )
    console.out.print(table)


@dataclass(frozen=True)
class _Job:
    """One wheel to build."""

    target: matrix.Target
    python: str
    kernels: tuple[matrix.Kernel, ...]
    architectures: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """CPU seconds of its kernel files with nothing cached."""
        return sum(kernels.seconds_expected(k, len(self.architectures)) for k in self.kernels)


@dataclass(frozen=True)
class _Built:
    """One wheel that was built."""

    path: Path
    size: int
    sha256: str
    seconds: float
    compiled: kernels.Compiled


def _build_one(loaded: matrix.Matrix, job: _Job, options: argparse.Namespace) -> _Built:
    build = ROOT / "build"
    started = time.monotonic()
    if options.stock:  # the first patch alone, which lets a build choose kernels and no more
        patches, applied = maintain.apply(loaded, options.source, ROOT / "build/stock-source", count=1)
    else:
        patches, applied = maintain.apply(loaded, options.source)
    console.step(f"Toolchain for {job.target.name}, Python {job.python}")
    tools = toolchain.assemble(job.target, job.python, build, cache=not options.no_cache)
    console.note(f"nvcc {tools.toolkit.version}: {tools.toolkit.why}")
    console.note(f"torch {tools.environment.torch}, C++ compiler {tools.cxx}")
    flavour = kernels.STOCK if options.stock else kernels.FORK
    plan = kernels.Plan(applied, tools, job.kernels, job.architectures, build, flavour)
    console.step(f"Kernel files: {len(plan.kernels)}, for {', '.join('sm_' + a for a in plan.architectures)}; and the binding")
    binding = kernels.binding_unit(plan)
    compiled = kernels.compile_units(plan, [binding, *kernels.kernel_units(plan)], options.jobs)
    console.note(
        f"{compiled.built} compiled in {console.duration(compiled.seconds)}; compile cache: {compiled.cache_hits} hits, {compiled.cache_misses} misses"
    )
    console.step("Linking")
    extension = binding.target.parent / f"{flavour.extension}-{'-'.join(plan.architectures)}.so"
    wheel.link(tools, compiled.objects, extension, build / "logs" / "link.log")
    out = options.out.resolve()
    if options.stock:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{flavour.extension}.cpython-{tools.environment.tag[2:]}-x86_64-linux-gnu.so"
        shutil.copyfile(extension, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    else:
        facts = wheel.provenance(loaded, job.target, patches, plan)
        path = wheel.pack(loaded, job.target, plan, extension, facts, notice=ROOT / "NOTICE", dist=out, log=build / "logs" / "metadata.log")
    content = path.read_bytes()
    built = _Built(path, len(content), hashlib.sha256(content).hexdigest(), time.monotonic() - started, compiled)
    console.done(f"{path}  {built.size / 1e6:.1f} MB  {console.duration(built.seconds)}")
    console.note(f"sha256 {built.sha256}")
    return built


def _jobs(loaded: matrix.Matrix, options: argparse.Namespace) -> list[_Job]:
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
            jobs.append(_Job(target, python, options.kernels or target.kernels, options.arch or target.architectures))
    if not jobs:
        raise UsageError("no target has the Python that was asked for.")
    return jobs


def _plan(loaded: matrix.Matrix, jobs: list[_Job], *, stock: bool) -> None:
    """Say what several builds will take, before the first. Kernels serve every Python and torch of one toolkit."""
    table = Table("target", "Python", "makes", "kernel files", "arch", "CPU time, nothing cached")
    seen: set[tuple[str, tuple[str, ...], matrix.Kernel]] = set()
    for job in jobs:
        fresh = {(job.target.toolkit, job.architectures, k) for k in job.kernels} - (set() if stock else seen)
        seen |= fresh
        seconds = sum(kernels.seconds_expected(k, len(job.architectures)) for _, _, k in fresh)
        what = kernels.STOCK.extension if stock else f"flash_attn {loaded.version(job.target)}"
        shared = f" ({len(job.kernels) - len(fresh)} from above)" if len(fresh) < len(job.kernels) else ""
        table.add_row(
            job.target.name,
            job.python,
            what,
            f"{len(job.kernels)}{shared}",
            ", ".join(job.architectures),
            console.duration(seconds) if seconds else "the binding",
        )
    console.out.print(table)


def _summary(jobs: list[_Job], results: list[_Built | BuildError]) -> None:
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


def _build_all(loaded: matrix.Matrix, jobs: list[_Job], options: argparse.Namespace) -> list[_Built | BuildError]:
    """Build one after the other; a failure stops no other. A single one raises it."""
    if len(jobs) == 1:
        return [_build_one(loaded, jobs[0], options)]
    results: list[_Built | BuildError] = []
    for job in jobs:
        try:
            results.append(_build_one(loaded, job, options))
        except BuildError as e:
            console.error(f"{job.target.name}, Python {job.python}: {e}")
            results.append(e)
    _summary(jobs, results)
    return results


def _build(options: argparse.Namespace) -> None:
    loaded = maintain.load()
    if options.list:
        _list(loaded)
        return
    jobs = _jobs(loaded, options)
    if options.source is upstream.Source.GIT and (unusable := upstream.submodule_state(loaded.upstream, ROOT / "upstream")):
        raise UpstreamError(f"--source git: {unusable}.")
    if options.stock and len(jobs) > 1:
        raise UsageError("--stock makes one file whatever the target; choose one target and one Python.")
    if options.dry_run or len(jobs) > 1:
        _plan(loaded, jobs, stock=options.stock)
    if options.dry_run:
        for name in sorted({k.source for job in jobs for k in job.kernels}):
            console.note(name)
        return
    free = shutil.disk_usage(ROOT).free
    if free < 8e9:
        console.warn(f"{free / 1e9:.0f} GB are free here; a first build takes about 8 GB, most of it for torch.")
    if failed := [r for r in _build_all(loaded, jobs, options) if isinstance(r, BuildError)]:
        raise SystemExit(failed[0].exit_code)
    if not options.stock:
        console.note("next: nox -s verify, on a machine with a GPU")


def _verify(options: argparse.Namespace) -> None:
    waiting: BuildError | None = None
    for path in options.wheels or verify.wheels_in(ROOT / "dist"):
        try:
            where = verify.check_series(verify.facts_of(path), ROOT, maintain.cache())
            console.note(f"{path.name}: its series is that of {where}")
            verify.verify(path, ROOT / "tests/wheel", ROOT / "build", options.pytest)
        except BuildError as e:
            console.error(str(e))
            # A failure outweighs a wheel that could not be proved.
            if waiting is None or e.exit_code > waiting.exit_code:
                waiting = e
    if waiting is not None:
        raise SystemExit(waiting.exit_code)


def main_inner(arguments: Sequence[str]) -> None:
    """Run one command; raise what goes wrong."""
    options = _parser().parse_args(arguments)
    as_json = getattr(options, "json", False)
    if as_json:
        console.use_json()
    try:
        options.run(options)
    except BuildError as e:
        if as_json:
            console.result({"error": str(e), "exit_code": e.exit_code})
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(options.interrupted) from None


def main() -> None:
    """Run one command; translate errors into text and exit status."""
    # A polite end from outside is as good as Ctrl-C: compilers stop, nothing half-written stays.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main_inner(sys.argv[1:])
    except BuildError as e:
        console.error(str(e))
        raise SystemExit(e.exit_code) from e
    except KeyboardInterrupt as e:
        console.error(str(e) or "interrupted.")
        raise SystemExit(130) from None
    except OSError as e:
        if e.filename is None:
            raise
        # A folder that is a file, a disk that is full or read-only: nobody needs our stack for that.
        console.error(f"{e.filename}: {e.strerror}.")
        raise SystemExit(BuildError.exit_code) from e


if __name__ == "__main__":
    main()

"""The command line: ``python -m scripts COMMAND``. The sessions of noxfile.py call it."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from scripts import changes, console, kernels, matrix, series, toolchain, upstream, verify, wheel
from scripts.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent


def _cache() -> Path:
    import platformdirs  # noqa: PLC0415 - only builds need it

    return Path(platformdirs.user_cache_dir("flash-attention-deterministic"))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _kernel_choice(text: str) -> tuple[matrix.Kernel, ...]:
    try:
        return matrix.parse_kernels(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def _architectures(text: str) -> tuple[str, ...]:
    chosen = tuple(sorted(set(text.replace(" ", "").split(",")), key=lambda a: (len(a), a)))
    if unknown := [a for a in chosen if a not in matrix.ARCHITECTURES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(matrix.ARCHITECTURES)} (90 is an H100 or H200)")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nox -s", description="Build and prove deterministic FlashAttention wheels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    build = commands.add_parser(
        "build", help="build wheels into dist/", description="Build wheels into dist/. An interrupted build goes on where it stopped."
    )
    which = build.add_mutually_exclusive_group()
    which.add_argument("--target", metavar="NAME", help="the target to build (default: the one marked in wheel_matrix.toml)")
    which.add_argument("--all", action="store_true", help="build every target")
    which.add_argument("--list", action="store_true", help="list the targets and stop")
    build.add_argument("--python", metavar="X.Y", help="the Python to build for (default: the one running this)")
    build.add_argument(
        "--kernels", metavar="SET", type=_kernel_choice, help="'all', or some of hdim64,…,fp16,bf16,fwd,split,bwd,causal,full (default: the target's)"
    )
    build.add_argument("--arch", metavar="CC,…", type=_architectures, help="compute capabilities, such as 80,90 (default: the target's)")
    build.add_argument("--jobs", metavar="N", type=_positive, help="compilers at once (default: by cores and memory)")
    build.add_argument(
        "--source",
        type=upstream.Source,
        choices=list(upstream.Source),
        default=upstream.Source.AUTO,
        metavar="git|sdist|auto",
        help="where upstream comes from (default: auto, the submodule where it is initialised)",
    )
    build.add_argument("--no-cache", action="store_true", help="do without the compile cache")
    build.add_argument("--stock", action="store_true", help="build unpatched kernels as a bare extension, to measure against (tests/wheel/bench.py)")
    build.add_argument("--out", metavar="DIR", type=Path, default=ROOT / "dist", help="where wheels go (default: dist/)")
    build.add_argument("--dry-run", action="store_true", help="say what would be done and stop")

    check = commands.add_parser(
        "verify",
        help="prove wheels",
        description="Prove wheels on the GPU of this machine; the proof is written beside each. Exit status 3: not verified, no GPU.",
    )
    check.add_argument("wheels", metavar="WHEEL", type=Path, nargs="*", help="default: every wheel in dist/")
    check.add_argument("--pytest", metavar="ARGUMENT", action="append", default=[], help="pass an argument to pytest; no proof is kept then")

    for name, text in (("changes", "render CHANGES.md from the patches"), ("export", "write the work tree's commits back to patches/")):
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument("--check", action="store_true", help="change nothing; fail when something would change")
    apply = commands.add_parser(
        "apply", help="apply the series to upstream in build/source", description="Apply the series to upstream in build/source, as commits."
    )
    apply.add_argument("--source", type=upstream.Source, choices=list(upstream.Source), default=upstream.Source.AUTO, metavar="git|sdist|auto")
    return parser


def _apply(loaded: matrix.Matrix, source: upstream.Source, *, stock: bool = False) -> tuple[series.Series, series.Tree]:
    """Apply the series; for stock kernels its first patch alone, which lets a build choose kernels and no more."""
    patches = series.read(ROOT / "patches")
    console.step(f"Upstream {loaded.upstream.version}")
    checkout = upstream.find(loaded.upstream, ROOT / "upstream", _cache() / "sdist", source)
    console.note(f"from {checkout.source.value}: {checkout.why}")
    if stock:
        patches = series.Series(patches.folder, patches.patches[:1])
    console.step(f"Applying {len(patches.patches)} of the patches")
    tree = series.apply(patches, loaded.upstream, checkout, ROOT / "build" / ("stock-source" if stock else "source"))
    console.note(f"commit {tree.commit}, digest {tree.digest[:16]}…, in {tree.root}")
    return patches, tree


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


def _build_one(loaded: matrix.Matrix, target: matrix.Target, python: str, options: argparse.Namespace) -> None:
    build = ROOT / "build"
    started = time.monotonic()
    patches, tree = _apply(loaded, options.source, stock=options.stock)
    console.step(f"Toolchain for {target.name}, Python {python}")
    tools = toolchain.assemble(target, python, build, cache=not options.no_cache)
    console.note(f"nvcc {tools.toolkit.version}: {tools.toolkit.why}")
    console.note(f"torch {tools.environment.torch}, C++ compiler {tools.cxx}")
    flavour = kernels.STOCK if options.stock else kernels.FORK
    plan = kernels.Plan(tree, tools, options.kernels or target.kernels, options.arch or target.architectures, build, flavour)
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
        facts = wheel.provenance(loaded, target, patches, plan)
        path = wheel.pack(loaded, target, plan, extension, facts, notice=ROOT / "NOTICE", dist=out, log=build / "logs" / "metadata.log")
    content = path.read_bytes()
    console.done(f"{path}  {len(content) / 1e6:.1f} MB  {console.duration(time.monotonic() - started)}")
    console.note(f"sha256 {hashlib.sha256(content).hexdigest()}")


def _build(options: argparse.Namespace) -> None:
    loaded = matrix.load(ROOT / "wheel_matrix.toml")
    if options.list:
        _list(loaded)
        return
    targets = loaded.targets if options.all else (loaded.named(options.target) if options.target else loaded.default(),)
    planned = [(target, toolchain.check_python(target, options.python)) for target in targets]
    if options.dry_run:
        for target, python in planned:
            chosen, architectures = options.kernels or target.kernels, options.arch or target.architectures
            seconds = sum(kernels.seconds_expected(k, len(architectures)) for k in chosen)
            console.step(
                f"{target.name}, Python {python}: flash_attn {loaded.version(target)}, {len(chosen)} kernel files for {', '.join('sm_' + a for a in architectures)}"
            )
            console.note(f"about {console.duration(seconds)} of one core with nothing cached")
            for kernel in chosen:
                console.note(kernel.source)
        return
    free = shutil.disk_usage(ROOT).free
    if free < 8e9:
        console.warn(f"{free / 1e9:.0f} GB are free here; a first build takes about 8 GB, most of it for torch.")
    for target, python in planned:
        _build_one(loaded, target, python, options)
    if not options.stock:
        console.note("next: nox -s verify, on a machine with a GPU")


def _verify(options: argparse.Namespace) -> None:
    waiting: BuildError | None = None
    for path in options.wheels or verify.wheels_in(ROOT / "dist"):
        try:
            verify.verify(path, ROOT / "tests/wheel", ROOT / "build", options.pytest)
        except BuildError as e:
            console.error(str(e))
            # A failure outweighs a wheel that could not be proved.
            if waiting is None or e.exit_code > waiting.exit_code:
                waiting = e
    if waiting is not None:
        raise SystemExit(waiting.exit_code)


def _changes(options: argparse.Namespace) -> None:
    text = changes.render(matrix.load(ROOT / "wheel_matrix.toml"), series.read(ROOT / "patches"))
    path = ROOT / "CHANGES.md"
    if options.check:
        changes.check(path, text)
        console.done("CHANGES.md is what the patches say.")
    else:
        console.done("CHANGES.md written." if changes.write(path, text) else "CHANGES.md was up to date.")


def _export(options: argparse.Namespace) -> None:
    names = series.export(ROOT / "build/source", ROOT / "patches", check=options.check)
    console.done(f"Wrote {', '.join(names)}." if names else "patches/ is what build/source says.")


def main_inner(arguments: Sequence[str]) -> None:
    """Run one command; raise what goes wrong."""
    options = _parser().parse_args(arguments)
    if options.command == "apply":
        _apply(matrix.load(ROOT / "wheel_matrix.toml"), options.source)
    else:
        {"build": _build, "verify": _verify, "changes": _changes, "export": _export}[options.command](options)


def main() -> None:
    """Run one command; translate errors into text and exit status."""
    # A polite end from outside is as good as Ctrl-C: compilers stop, nothing half-written stays.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main_inner(sys.argv[1:])
    except BuildError as e:
        console.error(str(e))
        raise SystemExit(e.exit_code) from e
    except KeyboardInterrupt:
        console.error("interrupted. What was compiled is kept: the same command goes on from there.")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()

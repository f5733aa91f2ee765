"""``each`` and ``bisect``: run a command on upstream and after patches, or compile after each."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from scripts.base import console, layout
from scripts.base.errors import SeriesError, UsageError
from scripts.commands import arguments
from scripts.lab import prefix_kernels
from scripts.series import clone, prefixes
from scripts.source import kernel_set


def add(commands: Any) -> None:
    """The two sub-parsers; each sets ``run``."""
    for name, run in (("each", _each), ("bisect", _bisect)):
        parser = arguments.series_parser(
            commands,
            name,
            "The command runs in the work tree, with FA2_PATCH and FA2_SOURCE set; status 125: "
            "cannot be tested.",
        )
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("--run", dest="run_command", metavar="CMD", type=_command, help="a shell command")
        if name == "each":
            _add_compile(parser, what)
        parser.set_defaults(run=run)


def _add_compile(parser: argparse.ArgumentParser, what: Any) -> None:
    what.add_argument(
        "--compile",
        action="store_true",
        help="compile a kernel file of each pass after every patch, with the build's flags; what a build or "
        "an earlier run compiled is kept",
    )
    parser.add_argument(
        "--place",
        action=arguments.Once,
        metavar="PATCH",
        help="after this patch alone (its place, or a part of its name)",
    )
    parser.add_argument(
        "--kernels",
        metavar="SET",
        type=arguments.kernel_choice,
        help=f"with --compile: these kernel files (default: {prefix_kernels.KERNELS})",
    )
    arguments.add_jobs(parser, "with --compile: compilers at once")


def _command(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return text


def _each(options: argparse.Namespace) -> None:
    loaded = arguments.chosen(options)
    if not options.compile and (options.kernels or options.jobs):
        raise UsageError("--kernels and --jobs are for --compile.")
    if options.compile and loaded.table.kind == "python":
        raise UsageError(f"--compile: of {loaded.name} nothing is compiled.")
    with clone.view(loaded, options.source) as (patches, applied):
        if options.compile:
            chosen = options.kernels or kernel_set.parse_kernels(prefix_kernels.KERNELS)
            check = prefix_kernels.check(patches, applied.base, chosen, options.jobs)
            first = 1
        else:
            check, first = prefixes.shell(options.run_command), 0
        last = len(patches.patches)
        if options.place:
            first = last = patches.named(options.place) + 1
        places = range(first, last + 1)
        runs = prefixes.at(patches, applied, check, layout.BUILD / "tmp", places)
    if options.json:
        console.result([asdict(r) for r in runs])
    failed = [run for run in runs if not run.passed and run.status != prefixes.UNTESTABLE]
    if failed:
        listed = "\n".join(f"    {run.what} (status {run.status})" for run in failed)
        raise SeriesError(f"it fails on {len(failed)} of {len(runs)}:\n{listed}")
    if untested := [r.patch for r in runs if not r.passed]:
        raise SeriesError(
            f"it could not be tested (125) on {', '.join(untested)}; it passes on the other "
            f"{len(runs) - len(untested)}."
        )
    where = f"after every one of the {len(patches.patches)} patches"
    where = f"after {runs[0].patch}" if options.place else where
    console.done(f"It passes {where if first else f'on upstream and {where}'}.")


def _bisect(options: argparse.Namespace) -> None:
    with clone.view(arguments.chosen(options), options.source) as (patches, applied):
        first, runs = prefixes.bisect(patches, applied, options.run_command, layout.BUILD / "tmp")
    if options.json:
        console.result({"first_failing": first, "runs": [asdict(r) for r in runs]})
    console.done(
        "It passes on the whole series; nothing to look for."
        if first is None
        else f"{first} is the first patch with which it fails."
    )

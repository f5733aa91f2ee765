"""``compare``: say what patches do to kernels' machine code, or in which kernels two wheels differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts.base import console, layout
from scripts.base.errors import UsageError
from scripts.commands import arguments, compare_wheels
from scripts.lab import compare
from scripts.lab.compare import KINDS, Difference
from scripts.series import clone
from scripts.source import kernel_set, matrix, matrix_checks, matrix_tables

if TYPE_CHECKING:
    import argparse

_ARCHITECTURE = "90"


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(
        commands,
        "compare",
        "Compiles kernel files with the series up to a patch and up to the one before it, and compares each "
        "kernel's machine code: which are the same byte for byte, which changed, are gone or new; their "
        "instructions, registers and local memory. With --wheels it compiles nothing: it compares two "
        "wheels that were built.",
    )
    parser.add_argument(
        "--wheels",
        action=arguments.Once,
        nargs=2,
        metavar=("OLD", "NEW"),
        type=Path,
        help="compare the kernels and the Python files of two wheels; status 1 where they differ",
    )
    parser.add_argument(
        "--ignore-names",
        action="store_true",
        help="with --wheels: a kernel may have another mangled name, where its code is the same",
    )
    parser.add_argument(
        "--ignore-offsets",
        action="store_true",
        help="with --wheels: a kernel's parameters may lie elsewhere, each wherever it is read",
    )
    parser.add_argument(
        "--patch", metavar="PATCH", help="its place, or a part of its name (default: the last)"
    )
    parser.add_argument("--through", metavar="PATCH", help="the last of several, which --patch begins")
    parser.add_argument(
        "--kernels",
        metavar="SET",
        type=arguments.kernel_choice,
        help=f"which kernel files (default: {compare.KERNELS}; see nox -s build -- --help)",
    )
    parser.add_argument(
        "--arch",
        metavar="CC",
        choices=matrix_tables.ARCHITECTURES,
        help=f"machine code for this one (default: {_ARCHITECTURE})",
    )
    arguments.add_jobs(parser)
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    arguments.add_source(parser)
    parser.set_defaults(run=_run, interrupted="interrupted. What was compiled is kept.")


def _run(options: argparse.Namespace) -> None:
    if options.wheels:
        compare_wheels.run(options)
        return
    if options.ignore_names or options.ignore_offsets:
        raise UsageError("--ignore-names and --ignore-offsets are for --wheels.")
    loaded = matrix.load(layout.MATRIX)
    whole = clone.series(loaded)
    first = whole.named(options.patch) if options.patch else len(whole.patches) - 1
    last = whole.named(options.through) if options.through else first
    if last < first:
        raise UsageError(f"--through {options.through}: that patch comes before {whole.patches[first].name}.")
    architecture = options.arch or _ARCHITECTURE
    if fault := matrix_checks.too_early(loaded.default().cuda, (architecture,)):
        raise UsageError(f"--arch: {fault}.")
    chosen = options.kernels or kernel_set.parse_kernels(compare.KERNELS)
    differences = compare.differences(
        loaded, first, last, compare.Request(chosen, architecture, options.source, options.jobs)
    )
    if options.json:
        facts = [
            {"file": d.file} | {kind: [_json(d, name) for name in d.names(kind)] for kind in KINDS}
            for d in differences
        ]
        console.result(
            {
                "patches": [p.name for p in whole.patches[first : last + 1]],
                "architecture": architecture,
                "files": facts,
            }
        )
    _show(differences)


def _json(difference: Difference, name: str) -> dict[str, Any]:
    both = {"before": difference.before.get(name), "after": difference.after.get(name)}
    return {"name": name, "spelled": compare.spell(name)} | {
        when: code.figures() for when, code in both.items() if code
    }


def _show(differences: list[Difference]) -> None:
    table = Table("kernel file", *KINDS, "instructions before", "after")
    for d in differences:
        totals = [sum(code.instructions for code in half.values()) for half in (d.before, d.after)]
        table.add_row(d.file, *(str(len(d.names(kind))) for kind in KINDS), *(str(total) for total in totals))
    for d in differences:
        for kind in KINDS[1:]:
            for name in d.names(kind):
                told = " → ".join(str(half[name]) for half in (d.before, d.after) if name in half)
                console.note(f"{d.file}, {kind}: {compare.spell(name)}: {told}")
    console.out.print(table)

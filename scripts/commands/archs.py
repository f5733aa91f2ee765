"""``archs``: check which compute capabilities may share PTX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts.base import console, layout
from scripts.base.errors import CompileError, UsageError
from scripts.commands import arguments
from scripts.lab import shared_ptx
from scripts.series import clone
from scripts.source import matrix, matrix_tables
from scripts.wheels.toolchain import compilers

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(
        commands,
        "archs",
        "Compiles kernel files with PTX of their own and with the PTX that [shared-ptx] says, and compares "
        "the machine code.",
    )
    parser.add_argument(
        "--kernels",
        metavar="SET",
        type=arguments.kernel_choice,
        help="as for build (default: the default target's)",
    )
    parser.add_argument(
        "--arch",
        metavar="CC,…",
        type=arguments.architectures,
        help="machine code for these (default: those of [shared-ptx])",
    )
    parser.add_argument(
        "--ptx",
        metavar="CC",
        choices=matrix_tables.ARCHITECTURES,
        default="80",
        help="from the PTX of this one, with --arch (default: 80)",
    )
    arguments.add_source(parser)
    parser.set_defaults(run=_run, interrupted="interrupted. What was compiled is kept.")


def _run(options: argparse.Namespace) -> None:
    loaded = matrix.load(layout.MATRIX)
    target = loaded.default()
    asked = {options.ptx: tuple(options.arch)} if options.arch else loaded.shared_ptx
    if not asked:
        raise UsageError(
            f"[shared-ptx] of {loaded.path.name} is empty; name compute capabilities with --arch."
        )
    if wrong := [a for base, others in asked.items() for a in others if int(a) <= int(base)]:
        raise UsageError(f"{', '.join(wrong)}: no later than the PTX that they would be made from (--ptx).")
    _, applied = clone.apply(loaded, options.source)
    tools = compilers.assemble(target, None, layout.BUILD, cache=True)
    comparisons = shared_ptx.check(applied, tools, options.kernels or target.kernels, asked)
    table = Table("kernel file", "machine code", "from the PTX of", "kernels", "differ")
    for c in comparisons:
        table.add_row(
            c.file, f"sm_{c.architecture}", f"compute_{c.base}", str(c.kernels), str(len(c.differing))
        )
    console.out.print(table)
    if differing := [c for c in comparisons if c.differing]:
        first = differing[0]
        raise CompileError(
            f"{len(differing)} of {len(comparisons)} differ, first {first.file} for "
            f"sm_{first.architecture}: {first.differing[0]}. Take "
            f"{', '.join(sorted({c.architecture for c in differing}))} out of [shared-ptx] in "
            f"{loaded.path.name}."
        )
    console.done(
        f"{sum(c.kernels for c in comparisons)} kernels: the same machine code from shared PTX as from their "
        "own."
    )

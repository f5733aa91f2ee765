"""``emulate``: try the kernels without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scripts.base import layout
from scripts.base.errors import UsageError
from scripts.commands import arguments
from scripts.lab import emulated_library, emulator, serving_clients
from scripts.source import kernel_set, matrix, matrix_tables

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(
        commands,
        "emulate",
        "Runs the kernels' PTX on the CPU, behind the real binding, against tests/emulator; "
        "or behind the C++ API, against tests/cpp.",
    )
    parser.add_argument(
        "--cpp",
        action="store_true",
        help="the C++ API and its test program (GTEST_FILTER chooses tests); needs no torch",
    )
    parser.add_argument(
        "--kernels",
        metavar="SET",
        type=arguments.kernel_choice,
        help=f"as for build (default: {emulator.KERNELS})",
    )
    parser.add_argument(
        "--arch",
        metavar="CC",
        choices=matrix_tables.ARCHITECTURES,
        default="90",
        help="the GPU's compute capability, such as 89 (default: 90)",
    )
    parser.add_argument(
        "--python",
        metavar="X.Y",
        type=arguments.python,
        help="the Python to run under (default: the one running this)",
    )
    parser.add_argument(
        "--client",
        choices=serving_clients.NAMES,
        help="an engine that serves models, installed beside: its own classes call the kernels",
    )
    arguments.add_jobs(parser, "compilers, then processes of tests, at once")
    arguments.add_source(parser)
    parser.add_argument(
        "--pytest", metavar="ARGUMENT", action="append", default=[], help="pass an argument to pytest"
    )
    parser.set_defaults(run=_run, interrupted="interrupted. What was compiled is kept.")


def _run(options: argparse.Namespace) -> None:
    asked = emulator.Emulation(
        options.kernels or kernel_set.parse_kernels(emulator.KERNELS),
        options.arch,
        options.python,
        options.source,
        options.jobs,
        tuple(options.pytest),
        options.client,
    )
    if options.cpp and (options.pytest or options.python or options.client):
        raise UsageError("--cpp runs neither Python nor pytest; leave out --python, --pytest and --client.")
    run = emulated_library.emulate if options.cpp else emulator.emulate
    run(matrix.load(layout.MATRIX), asked)

"""The parser of all commands, in the order of ``--help``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from scripts.commands import (
    apply,
    archs,
    audit,
    bench,
    build,
    changes,
    compare,
    emulate,
    export,
    forecast,
    guards,
    image,
    lint,
    matrix,
    patches,
    prefixes,
    rebase,
    timings,
    verify,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODULES = (
    build, matrix, image, emulate, archs, bench, compare, verify, audit,
    apply, export, patches, lint, guards, forecast, rebase, prefixes, timings, changes,
)  # fmt: skip


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of one command: ``run`` takes them, ``interrupted`` is what to say after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="nox -s", description="Build and prove deterministic FlashAttention wheels."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _MODULES:
        module.add(commands)
    for name, command in commands.choices.items():
        command.prog = f"nox -s {name} --"  # as nox passes arguments on
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # said with the usage of the command, not of all
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options

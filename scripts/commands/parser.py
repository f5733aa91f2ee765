"""The parser of all commands, in the order of the table."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

from scripts.commands.table import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of one command: ``run`` takes them, ``interrupted`` is what to say after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="nox -s", description="Build and prove deterministic FlashAttention wheels."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in dict.fromkeys(command.module_name for command in COMMANDS):
        import_module(module).add(commands)
    for name, command in commands.choices.items():
        command.prog = f"nox -s {name} --"  # as nox passes arguments on
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # said with the usage of the command, not of all
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options

"""``audit``: check that wheels need no library that users lack."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.base import console
from scripts.commands import arguments
from scripts.wheels.trust import binaries

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(commands, "audit")
    parser.add_argument("wheels", metavar="WHEEL", type=Path, nargs="+")
    parser.set_defaults(run=_run, interrupted="interrupted.")


def _run(options: argparse.Namespace) -> None:
    for path in options.wheels:
        console.done(f"{path.name} needs {', '.join(binaries.audit(path))}")

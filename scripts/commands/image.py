"""``image``: make a container image where no registry can be reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scripts.base import console, layout
from scripts.commands import arguments
from scripts.source import matrix_tables
from scripts.wheels.building import image
from scripts.wheels.toolchain import compilers

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(
        commands,
        "image",
        "The image is for --containers, made from Debian's packages and this machine's CPythons. Needs root, "
        "debootstrap and podman.",
    )
    parser.add_argument(
        "--python",
        metavar="X.Y,…",
        type=arguments.pythons,
        help="the CPythons to take over, from PATH or pyenv (default: 3.12,3.13)",
    )
    parser.add_argument("--mirror", metavar="URL", help="Debian's mirror (default: debootstrap's)")
    parser.set_defaults(run=_run, interrupted="interrupted; no image was made.")


def _run(options: argparse.Namespace) -> None:
    interpreters = [
        compilers.find_python(version)
        for version in (
            matrix_tables.PYTHONS if options.python == ("all",) else options.python or ("3.12", "3.13")
        )
    ]
    console.done(
        f"{image.make_image(interpreters, layout.BUILD / 'containers', options.mirror)}; next: "
        "nox -s build -- --containers --image NAME"
    )

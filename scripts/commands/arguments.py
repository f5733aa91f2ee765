"""Arguments that several commands take: their types, and what is wrong with one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.base import layout
from scripts.commands import table
from scripts.source import kernel_set, matrix, matrix_tables, upstream
from scripts.wheels.cluster import schedulers

if TYPE_CHECKING:
    from scripts.source.kernel_set import Kernel
    from scripts.source.matrix import Matrix


class Once(argparse.Action):
    """An option that may be given once: argparse takes the last of several without a word."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Take the value, or refuse a second one."""
        seen: set[str] = namespace.__dict__.setdefault("_seen", set())
        if self.dest in seen:
            parser.error(f"{option_string} is given twice")
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


def positive(text: str) -> int:
    """A number that an option counts with."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def kernel_choice(text: str) -> tuple[Kernel, ...]:
    """The kernels that an option names."""
    try:
        return kernel_set.parse_kernels(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def pythons(text: str) -> tuple[str, ...]:
    """The Pythons that an option names, or ``all``."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if unknown := [word for word in words if word not in matrix_tables.PYTHONS and words != ("all",)]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, unknown))}: choose from {', '.join(matrix_tables.PYTHONS)}, or 'all'"
        )
    return words


def python(text: str) -> str:
    """The Python that an option names."""
    if text not in matrix_tables.PYTHONS:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(matrix_tables.PYTHONS)}")
    return text


def architectures(text: str) -> tuple[str, ...]:
    """The compute capabilities that an option names, in order."""
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in matrix_tables.ARCHITECTURES]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, unknown))}: choose from {', '.join(matrix_tables.ARCHITECTURES)} (90 is "
            "an H100 or H200)"
        )
    return tuple(sorted(set(words), key=lambda a: (len(a), a)))


def folder(text: str) -> Path:
    """A folder that is there and can be written to, or can be made."""
    path = Path(text).resolve()
    existing = next(p for p in (path, *path.parents) if p.exists())
    if not existing.is_dir():
        raise argparse.ArgumentTypeError(f"{existing} is a file, not a folder")
    if not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"{existing} cannot be written to")
    return path


def add_source(parser: argparse.ArgumentParser) -> None:
    """``--source``, of every command that needs upstream."""

    def source(text: str) -> upstream.Source:
        try:
            return upstream.Source(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is none of git, sdist, auto") from None

    parser.add_argument(
        "--source",
        type=source,
        default=upstream.Source.AUTO,
        metavar="git|sdist|auto",
        help="where upstream comes from: the submodule, the package index, or (auto, the default) the "
        "submodule where it is initialised",
    )


def add_jobs(parser: argparse.ArgumentParser, what: str = "compilers at once", action: Any = "store") -> None:
    """``--jobs``, of every command that compiles."""
    parser.add_argument(
        "--jobs",
        action=action,
        metavar="N",
        type=positive,
        help=f"{what} (default: by cores and memory)",
    )


def add_scheduler(parser: argparse.ArgumentParser, what: str) -> None:
    """``--scheduler``, of every command whose work other machines can do."""

    def scheduler(text: str) -> schedulers.Scheduler:
        try:
            return schedulers.parse(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    parser.add_argument(
        "--scheduler",
        action=Once,
        metavar="ADDRESS",
        type=scheduler,
        help=f"{what} on the workers of a Dask scheduler: tcp://HOST:PORT; local[:N], N workers here; or "
        "slurm[:N], N jobs of Slurm (docs/machines.md)",
    )


def sub_parser(commands: Any, name: str, more: str = "") -> argparse.ArgumentParser:
    """The parser of a command: its line of the table, and ``more`` of what it does."""
    line = table.command(name).line
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=line[0].lower() + line[1:], description=f"{line}. {more}".strip()
    )
    return parser


FIRST = "the first of wheel_matrix.toml"


def series_parser(
    commands: Any, name: str, more: str = "", *, needs_source: bool = True, otherwise: str = FIRST
) -> argparse.ArgumentParser:
    """The parser of a command that keeps the series.

    It has ``--json``, and ``--source`` if the command needs upstream. ``otherwise`` says whose
    series it takes where none is named.
    """
    parser = sub_parser(commands, name, more)
    parser.set_defaults(interrupted="interrupted; nothing was changed.")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document on stdout; what is read by people goes to stderr",
    )
    add_upstream(parser, otherwise)
    if needs_source:
        add_source(parser)
    return parser


def add_upstream(parser: argparse.ArgumentParser, otherwise: str = FIRST) -> None:
    """``--upstream``, of every command that works on one of them."""
    parser.add_argument(
        "--upstream", action=Once, metavar="NAME", help=f"which upstream's series (default: {otherwise})"
    )


def add_sign(parser: argparse.ArgumentParser, what: str) -> None:
    """``--sign``, of the commands that write statements."""
    parser.add_argument(
        "--sign",
        action="store_true",
        help=f"sign the statement of {what} with sigstore, by your identity or that of CI, which a public "
        "log keeps; needs a network",
    )


def every_chosen(options: argparse.Namespace) -> tuple[Matrix, ...]:
    """The matrix as each upstream sees it, or the one that ``--upstream`` names."""
    loaded = matrix.load(layout.MATRIX)
    return loaded.each() if options.upstream is None else (loaded.of(options.upstream),)


def chosen(options: argparse.Namespace) -> Matrix:
    """The matrix, as the upstream that ``--upstream`` names sees it, or the first."""
    return matrix.load(layout.MATRIX).of(options.upstream)

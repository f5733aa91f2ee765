"""The command line: ``python -m scripts COMMAND``. The sessions of noxfile.py call it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import maintain
from scripts.base import console, layout
from scripts.base.errors import BuildError, NotVerified
from scripts.lab import build_cost, compare, emulator, shared_ptx
from scripts.source import matrix, upstream
from scripts.wheels import build, verify, wheel

if TYPE_CHECKING:
    from collections.abc import Sequence


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s", description="Build and prove deterministic FlashAttention wheels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    build.add_command(commands)
    emulator.add_command(commands)
    shared_ptx.add_command(commands)
    build_cost.add_command(commands)
    compare.add_command(commands)
    check = commands.add_parser(
        "verify",
        help="prove wheels",
        description="Prove wheels on the GPU of this machine; the proof is written beside each. Without a GPU it ends with 'not verified': exit status 3 of python -m scripts verify, 1 of nox as of any failure.",
    )
    check.add_argument("wheels", metavar="WHEEL", type=Path, nargs="*", help="default: every wheel in dist/")
    check.add_argument("--pytest", metavar="ARGUMENT", action="append", default=[], help="pass an argument to pytest; no proof is kept then")

    audit = commands.add_parser("audit", help="check which libraries wheels need", description="Check that wheels need no library that users lack.")
    audit.add_argument("wheels", metavar="WHEEL", type=Path, nargs="+")
    audit.set_defaults(run=_audit, interrupted="interrupted.")
    check.add_argument(
        "--write-upstream-tests", metavar="FILE", type=Path, help="write upstream's own tests there, for a GPU host without a network, and stop"
    )
    check.set_defaults(run=_verify, interrupted="interrupted; no proof was written.")
    maintain.add_commands(commands)
    for name, command in commands.choices.items():
        command.prog = f"nox -s {name} --"  # as nox passes arguments on
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # said with the usage of the command, not of all
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _audit(options: argparse.Namespace) -> None:
    for path in options.wheels:
        console.done(f"{path.name} needs {', '.join(wheel.audit(path))}")


def _verify(options: argparse.Namespace) -> None:
    if options.write_upstream_tests is not None:
        verify.write_upstream_tests(upstream.pinned(matrix.load(layout.MATRIX).upstream, upstream.Source.AUTO), options.write_upstream_tests)
        console.done(f"{options.write_upstream_tests} written.")
        return
    waiting: BuildError | None = None
    for path in options.wheels or verify.wheels_in(layout.DIST):
        try:
            origin = verify.check_series(verify.facts_of(path), layout.ROOT, layout.cache("sdist"))
            console.note(f"{path.name}: its series is that of {origin.where}")
            verify.verify(path, origin.checkout, layout.ROOT / "tests/wheel", layout.BUILD, options.pytest)
        except BuildError as e:
            console.error(str(e))
            # A failure outweighs a wheel that could not be proved.
            if waiting is None or (isinstance(waiting, NotVerified) and not isinstance(e, NotVerified)):
                waiting = e
    if waiting is not None:
        raise SystemExit(waiting.exit_code)


def main_inner(arguments: Sequence[str]) -> None:
    """Run one command; raise what goes wrong."""
    options = _parse(arguments)
    as_json = getattr(options, "json", False)
    if as_json:
        console.use_json()
    try:
        options.run(options)
    except BuildError as e:
        if as_json:
            console.result({"error": str(e), "exit_code": e.exit_code})
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(options.interrupted) from None


def main() -> None:
    """Run one command; translate errors into text and exit status."""
    # A polite end from outside is as good as Ctrl-C: compilers stop, nothing half-written stays.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main_inner(sys.argv[1:])
        sys.stdout.flush()
    except BuildError as e:
        console.error(str(e))
        raise SystemExit(e.exit_code) from e
    except KeyboardInterrupt as e:
        console.error(str(e) or "interrupted.")
        raise SystemExit(130) from None
    except BrokenPipeError:  # what reads our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as e:
        if e.filename is None:
            raise
        # A folder that is a file, a disk that is full or read-only: nobody needs our stack for that.
        console.error(f"{e.filename}: {e.strerror}.")
        raise SystemExit(BuildError.exit_code) from e


if __name__ == "__main__":
    main()

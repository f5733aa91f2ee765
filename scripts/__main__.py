"""The command line: ``python -m scripts COMMAND``, its errors as text, its exit status.

The sessions of noxfile.py call it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING

from scripts.base import console, files
from scripts.base.errors import BuildError
from scripts.commands.parser import parse

if TYPE_CHECKING:
    from collections.abc import Sequence


def main_inner(arguments: Sequence[str]) -> None:
    """Run one command; raise what goes wrong."""
    options = parse(arguments)
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
        told = files.first_of(e) if isinstance(e, shutil.Error) else e
        if told.errno is None:
            raise
        # A folder that is a file, a disk that is full or read-only: nobody needs our stack for that.
        place = f"{told.filename}: " if told.filename is not None else "while a file was written: "
        console.error(f"{place}{told.strerror}.")
        raise SystemExit(BuildError.exit_code) from e


if __name__ == "__main__":
    main()

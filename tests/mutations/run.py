"""Whether the tests notice a mistake: make one that matters, and run the tests that should fail.

    python -m tests.mutations.run [NAME…] [--list] [--ring unit|path|emulated]

``mutations.toml`` has the mistakes. Each is made in a copy of this checkout, files that are not committed
included, so no file that git knows changes here. The copy lies in build/mutations, shares build/env, and goes at
the end; that of a run that was killed goes when the next begins. Before the first mistake the same tests must
pass. No ring of tests runs this: it takes minutes for the unit tests, and an hour for kernels.

Exit status: 0 every mistake was noticed, 1 some was not, 130 interrupted. Another says that a mistake could
not be made, or its tests not be run.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.base import console, layout
from scripts.base.errors import BuildError, UsageError, VerifyError
from scripts.base.process import last_lines, quoted
from tests.mutations import copies, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tests.mutations.table import Mutation


@dataclass(frozen=True)
class Ring:
    """How tests are run: a module of Python, with its arguments."""

    words: str
    failed: int  # the status that says a test failed, and not that none could run
    said: str  # what is said then, too
    limit: int  # seconds


_EMULATE = "scripts emulate --source sdist"
_CASES = "--pytest=-k --pytest={any_of}"
_FAILED = VerifyError.exit_code, "the suite failed under emulation: pytest exited with 1;", 7200
RINGS = {
    "unit": Ring("pytest -p no:cacheprovider -x -q {tests}", 1, "", 1800),
    "path": Ring(f"{_EMULATE} --kernels {{kernels}} {_CASES}", *_FAILED),
    "emulated": Ring(f"{_EMULATE} --kernels hdim32,fp16,causal {_CASES}", *_FAILED),
}


def command(ring: str, tests: Sequence[str], kernels: str) -> list[str]:
    """What runs these tests."""
    words = [sys.executable, "-m"]
    for word in RINGS[ring].words.split():
        filled = word.format(tests="", any_of=" or ".join(tests), kernels=kernels)
        words += tests if word == "{tests}" else [filled]
    return words


def _run(copy: Path, ring: str, tests: Iterable[str], kernels: str) -> tuple[str, int, str]:
    """Run tests of a ring in the copy: the command, its status, and what it said."""
    words = command(ring, list(dict.fromkeys(tests)), kernels)
    return quoted(words), *copies.run(words, copy, RINGS[ring].limit)


def require_green(copy: Path, chosen: Iterable[Mutation]) -> None:
    """Without a mutation the tests pass: else it would say nothing that they fail.

    Raises:
        UsageError: they do not, or there are none.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for mutation in chosen:
        groups.setdefault((mutation.ring, mutation.kernels), []).extend(mutation.tests)
    for (ring, kernels), tests in groups.items():
        words, status, said = _run(copy, ring, tests, kernels)
        if status != 0 or not re.search(r"\d+ passed", said):
            raise UsageError(
                f"without a mutation {words} exited with {status}, and must pass:\n{last_lines(said, 60)}"
            )


def noticed(copy: Path, name: str, mutation: Mutation) -> str | None:
    """The first test that fails with a mutation; None where none does.

    Raises:
        UsageError: the old text is not there once, or the tests cannot be run, as of code that does not
            compile.
    """
    with copies.mutated(copy, name, mutation):
        words, status, said = _run(copy, mutation.ring, mutation.tests, mutation.kernels)
    ring = RINGS[mutation.ring]
    if status == 0:
        return None
    if status != ring.failed or ring.said not in said:
        raise UsageError(f"{name}: {words} exited with {status}:\n{last_lines(said, 60)}")
    failed = re.search(r"^(?:FAILED|ERROR) (?:.*::)?(.+?)(?: - .*)?$", said, re.MULTILINE)
    return failed[1] if failed else "a test"


def chosen_of(mutations: dict[str, Mutation], names: Sequence[str], ring: str | None) -> dict[str, Mutation]:
    """Those of these names, and of this ring; all where none is named.

    Raises:
        UsageError: a name is none.
    """
    if unknown := [name for name in names if name not in mutations]:
        raise UsageError(f"no mutation is named {', '.join(unknown)}; --list tells the names.")
    return {
        name: mutation
        for name, mutation in mutations.items()
        if (not names or name in names) and ring in (None, mutation.ring)
    }


def _row(*cells: object) -> None:
    console.out.print("{:8}  {:>7}  {:28}  {}".format(*cells), markup=False)


def try_all(root: Path, chosen: dict[str, Mutation]) -> int:
    """Make the mutations one after another, and tell which are noticed; how many are not."""
    survived = 0
    with copies.copied(root) as copy:
        require_green(copy, chosen.values())
        _row("", "seconds", "mutation", "noticed by, or what nobody noticed")
        for name, mutation in chosen.items():
            begun = time.monotonic()
            by = noticed(copy, name, mutation)
            verdict, seconds = "SURVIVED" if by is None else "caught", time.monotonic() - begun
            _row(verdict, f"{seconds:.1f}", name, by or f"no more: {mutation.keeps}")
            survived += by is None
    console.out.print(f"{len(chosen) - survived} caught, {survived} survived")
    return survived


def main(words: Sequence[str], root: Path = layout.ROOT, mutations: Path = table.TABLE) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a mutation (default: all)")
    parser.add_argument("--list", action="store_true", help="tell the mutations, and make none")
    parser.add_argument("--ring", choices=RINGS, help="those alone that tests of this ring should notice")
    options = parser.parse_args(words)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        chosen = chosen_of(table.read(mutations), options.names, options.ring)
        if options.list:
            for name, mutation in chosen.items():
                _row(mutation.ring, mutation.kind, name, mutation.keeps)
            return 0
        if not chosen:
            raise UsageError(
                f"none of the mutations named is of the ring {options.ring}; --list tells the rings."
            )
        return int(try_all(root, chosen) > 0)
    except OSError as e:
        console.error(f"{e.filename or 'a file of the copy'}: {e.strerror or e}.")
        return UsageError.exit_code
    except BuildError as e:
        console.error(str(e))
        return e.exit_code
    except KeyboardInterrupt:
        console.error("interrupted; no file that git knows was changed here.")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``doctor``: which wheel fits a machine, and what keeps an installed one from working."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.base import console, layout
from scripts.base.errors import UsageError, VerifyError
from scripts.commands import arguments
from scripts.series import clone
from scripts.source import matrix
from scripts.wheels.proof import doctor
from scripts.wheels.proof.doctor import Question

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(
        commands,
        "doctor",
        "What is installed for a Python, what keeps it from working, and which of some wheels fit. An "
        "installed wheel says the same of itself: python -m flash_attn.doctor. Exits with 1 where something "
        "is wrong.",
    )
    parser.add_argument(
        "wheels",
        metavar="WHEEL",
        type=Path,
        nargs="*",
        help="wheels to choose from, or folders of them (default: dist/)",
    )
    parser.add_argument(
        "--python",
        action=arguments.Once,
        type=Path,
        metavar="PATH",
        help="the Python that is to import flash_attn (default: python3 on PATH, but for nox's own)",
    )
    parser.add_argument(
        "--head-dim",
        action="append",
        type=arguments.positive,
        default=[],
        metavar="N",
        help="a head dim that calls will have",
    )
    parser.add_argument("--no-import", action="store_true", help="do not try the imports")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_run, interrupted="interrupted.")


def _run(options: argparse.Namespace) -> None:
    for path in options.wheels:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder.")
    question = Question(
        options.python or doctor.users_python(),
        tuple(options.wheels) or ((layout.DIST,) if layout.DIST.is_dir() else ()),
        tuple(options.head_dim),
        not options.no_import,
        options.json,
    )
    own = clone.series(matrix.load(layout.MATRIX)).own
    done = doctor.ask(own, question, layout.BUILD / "doctor")
    if options.json:
        try:
            console.result(json.loads(done.stdout))
        except ValueError as e:
            raise VerifyError(f"the doctor ended with {done.returncode} and gave no answer.") from e
    if done.returncode:
        raise SystemExit(done.returncode)

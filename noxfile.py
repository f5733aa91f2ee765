"""What each session installs and calls.

``nox -l`` lists the sessions; ``nox -s NAME -- --help`` explains one (tests takes pytest's arguments).
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))  # nox runs from an environment of its own

from scripts.commands.table import COMMANDS, Command

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]


def _add_session(command: Command) -> None:
    """Make the session of a command: install the build system, and run the command."""

    def run(session: nox.Session) -> None:
        extra = command.extra_for(session.posargs)
        session.install("--quiet", "--editable", f".[{extra}]" if extra else ".", *command.requirements)
        # Ctrl-C: give the compilers time to stop, and their half-written files time to go.
        # stderr: nox would put it among --json's answer.
        session.run(
            "python",
            "-m",
            "scripts",
            command.name,
            *session.posargs,
            interrupt_timeout=60,
            terminate_timeout=30,
            stderr=None,
        )

    run.__doc__ = f"{command.line}."
    nox.session(name=command.name)(run)


for _command in COMMANDS:
    if _command.name != "lint":  # which has its own session, below
        _add_session(_command)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the unit and integration tests; no GPU needed."""
    session.install("--quiet", "--editable", ".[test]")
    if session.posargs:
        session.run("python", "-m", "pytest", *session.posargs)
    else:
        session.run("python", "-m", "pytest", "--numprocesses=auto", "scripts", "tests/unit")
        # One by one: compilers take all cores and the memory.
        session.run("python", "-m", "pytest", "tests/integration")


@nox.session
def lint(session: nox.Session) -> None:
    """Check the patches; and, without arguments, this repository's own style, types and layers."""
    session.install("--quiet", "--editable", ".[lint]", "pytest", "hypothesis", "nox")
    session.run("python", "-m", "scripts", "lint", *session.posargs, stderr=None)
    if not session.posargs:
        session.run("ruff", "check", ".")
        session.run("ruff", "format", "--check", ".")
        session.run("mypy")
        session.run("lint-imports")

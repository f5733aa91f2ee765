"""What each session installs and calls.

``nox -l`` lists the sessions; ``nox -s NAME -- --help`` explains one (tests takes pytest's arguments).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nox

sys.path.insert(0, str(Path(__file__).parent))  # nox runs from an environment of its own

from scripts.commands.table import COMMANDS, Command

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["check"]

UNIT_TESTS = ("scripts", "tests/unit")  # and the examples in docstrings
SIDE_BY_SIDE = ("--numprocesses=auto", "--dist=worksteal")  # a process for each core
LANES = ("--numprocesses=2", "--dist=loadfile")  # what compiles in this clone, and what is apart from it
WHEELS = ("flash-attn", "flash-attn-4")  # folders of fork/ with their Python
COMMAND_ENVIRONMENT, DEVELOPER_ENVIRONMENT = "commands", "developers"  # sessions that make them
_PROGRAMS: dict[str, Path | None] = {}  # the bin/ of each environment; None: --force-venv-backend none


def _requirements(*groups: str) -> list[str]:
    """What dependency groups of pyproject.toml ask for."""
    return list(nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), *groups))


def _install(session: nox.Session, *groups: str) -> None:
    session.install("--quiet", "--editable", ".", *_requirements(*groups))
    _PROGRAMS[session.name] = Path(session.bin) if session.bin_paths else None


def _run(session: nox.Session, environment: str, program: str, *arguments: str, **how: Any) -> None:
    """Run a program of a shared environment, as if the session had it to itself."""
    if folder := _PROGRAMS[environment]:
        path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
        session.env.update(PATH=path, VIRTUAL_ENV=str(folder.parent))
        program = str(folder / program)
    # Processes that a command or a test starts take seconds where Python compiles torch's modules each time.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.run(program, *arguments, external=True, **how)


def _add_session(command: Command) -> None:
    """Make the session of a command: add what its options need, and run the command."""

    def run(session: nox.Session) -> None:
        if groups := command.dependency_groups(session.posargs):
            install = ("-m", "pip", "install", "--quiet")
            # stderr: as below; pip warns there.
            _run(session, COMMAND_ENVIRONMENT, "python", *install, *_requirements(*groups), stderr=None)
        # Ctrl-C: give the compilers time to stop, and their half-written files time to go.
        # stderr: nox would put it among --json's answer.
        _run(
            session,
            COMMAND_ENVIRONMENT,
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
    nox.session(name=command.name, venv_backend="none", requires=[COMMAND_ENVIRONMENT])(run)


for _command in COMMANDS:
    if _command.name != "lint":  # which has its own session, below
        _add_session(_command)


@nox.session(venv_backend="none", requires=[DEVELOPER_ENVIRONMENT])
def check(session: nox.Session) -> None:
    """Check style, types, layers and the patches' form, and run the unit tests: a minute."""
    _lint(session)
    # All of them: what a test depends on is often a patch, the matrix or another process, and
    # no program that picks the tests of changed lines sees those.
    pytest = ["-m", "pytest", "--quiet", *SIDE_BY_SIDE]
    told = ["--cov", "--cov-report="]  # coverage in a line; in a table: coverage report
    _run(session, DEVELOPER_ENVIRONMENT, "python", *pytest, *told, *(session.posargs or UNIT_TESTS))


@nox.session(venv_backend="none", requires=[DEVELOPER_ENVIRONMENT])
def tests(session: nox.Session) -> None:
    """Run the unit tests and one real path to a wheel; no GPU needed. --all-cases: what .ci/run does."""
    pytest = ("python", "-m", "pytest")
    if not {"--all-cases", "--every-turn"}.issuperset(session.posargs):
        _run(session, DEVELOPER_ENVIRONMENT, *pytest, *session.posargs)
        return
    unit, integration = ("build/times/unit.json", "build/times/integration.json")
    timed = (*pytest, "-p", "tests.times", "--times")
    _run(session, DEVELOPER_ENVIRONMENT, *timed, unit, *SIDE_BY_SIDE, *UNIT_TESTS)
    # No more side by side: compilers take all cores and the memory.
    chosen = (*LANES, *session.posargs) if session.posargs else ("-m", "path")
    _run(session, DEVELOPER_ENVIRONMENT, *timed, integration, "tests/integration", *chosen)
    if not session.posargs:  # .ci/run does more, and tells of its ring itself
        _run(session, DEVELOPER_ENVIRONMENT, "python", "-m", "tests.times", "tests", unit, integration)


@nox.session(venv_backend="none", requires=[DEVELOPER_ENVIRONMENT])
def lint(session: nox.Session) -> None:
    """Check the patches; and, without arguments, this repository's own style, types, layers and workflows."""
    _lint(session, *session.posargs)


def _lint(session: nox.Session, *arguments: str) -> None:
    _run(session, DEVELOPER_ENVIRONMENT, "python", "-m", "scripts", "lint", *arguments, stderr=None)
    if not arguments:
        _run(session, DEVELOPER_ENVIRONMENT, "ruff", "check", ".")
        _run(session, DEVELOPER_ENVIRONMENT, "ruff", "format", "--check", ".")
        _run(session, DEVELOPER_ENVIRONMENT, "mypy")
        for wheel in WHEELS:  # each as it is alone, beside stubs of what it imports
            path = os.pathsep.join([f"fork/{wheel}", f"fork/stubs/{wheel}"])
            own = ("mypy", "--config-file", "fork/mypy.ini", f"fork/{wheel}")
            _run(session, DEVELOPER_ENVIRONMENT, *own, env={"MYPYPATH": path})
        _run(session, DEVELOPER_ENVIRONMENT, "lint-imports")
        _lint_workflows(session)


def _lint_workflows(session: nox.Session) -> None:
    """Check .github/workflows; without asking GitHub, or programs of some machines: one answer everywhere."""
    paths = [str(path) for path in sorted(Path(".github/workflows").glob("*.yml"))]
    _run(session, DEVELOPER_ENVIRONMENT, "actionlint", "-shellcheck=", "-pyflakes=", *paths)
    _run(session, DEVELOPER_ENVIRONMENT, "zizmor", "--offline", "--quiet", "--persona=pedantic", *paths)


@nox.session
def commands(session: nox.Session) -> None:
    """Make the environment that all commands share. They do so themselves."""
    _install(session)


@nox.session
def developers(session: nox.Session) -> None:
    """Make the environment that check, lint and tests share. They do so themselves."""
    _install(session, "test", "lint")

"""What each session installs and calls. ``nox -l`` lists them; ``nox -s NAME -- --help`` explains one (tests takes pytest's arguments)."""

from __future__ import annotations

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]


def _command(session: nox.Session) -> None:
    """Install the build system and run the command that the session is named after."""
    package = (
        ".[containers]"
        if "--containers" in session.posargs
        else ".[bench]"
        if any(a.startswith("--picture") for a in session.posargs)
        else "."
    )
    session.install(
        "--quiet", "--editable", package, *(["pytest>=8.4"] if session.name in ("guards", "rebase") else [])
    )  # guards may be tests
    # Ctrl-C: give the compilers time to stop and their half-written files time to go. stderr: nox would put it among --json's answer.
    session.run(
        "python",
        "-m",
        "scripts",
        session.name,
        *session.posargs,
        interrupt_timeout=60,
        terminate_timeout=30,
        stderr=None,
    )


@nox.session
def build(session: nox.Session) -> None:
    """Build wheels into dist/."""
    _command(session)


@nox.session
def matrix(session: nox.Session) -> None:
    """List the targets, or render the workflow that builds them."""
    _command(session)


@nox.session
def archs(session: nox.Session) -> None:
    """Check which compute capabilities may share PTX."""
    _command(session)


@nox.session
def compare(session: nox.Session) -> None:
    """Say what a patch does to kernels' machine code."""
    _command(session)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the kernels on this machine's GPU, or the build (bench -- build), beside upstream's."""
    _command(session)


@nox.session
def image(session: nox.Session) -> None:
    """Make a container image where no registry can be reached."""
    _command(session)


@nox.session
def audit(session: nox.Session) -> None:
    """Check that wheels need no library that users lack."""
    _command(session)


@nox.session
def verify(session: nox.Session) -> None:
    """Prove the wheels in dist/ on this machine's GPU."""
    _command(session)


@nox.session
def emulate(session: nox.Session) -> None:
    """Run the kernels without a GPU, interpreted; finds faults, proves nothing."""
    _command(session)


@nox.session
def apply(session: nox.Session) -> None:
    """Apply the patch series to upstream, in build/source."""
    _command(session)


@nox.session
def export(session: nox.Session) -> None:
    """Write the commits of build/source back to patches/."""
    _command(session)


@nox.session
def patches(session: nox.Session) -> None:
    """List the patches: purpose, files, guards, and which needs which."""
    _command(session)


@nox.session
def guards(session: nox.Session) -> None:
    """Run each patch's guard without and with the patch."""
    _command(session)


@nox.session
def forecast(session: nox.Session) -> None:
    """Say what becomes of the patches on other releases of upstream."""
    _command(session)


@nox.session
def rebase(session: nox.Session) -> None:
    """Move the series to another release of upstream."""
    _command(session)


@nox.session
def each(session: nox.Session) -> None:
    """Run a command after every patch."""
    _command(session)


@nox.session
def bisect(session: nox.Session) -> None:
    """Find the first patch with which a command fails."""
    _command(session)


@nox.session
def timings(session: nox.Session) -> None:
    """Time the series' commands beside git am and quilt."""
    _command(session)


@nox.session
def changes(session: nox.Session) -> None:
    """Render CHANGES.md from the patches."""
    _command(session)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the unit and integration tests; no GPU needed."""
    session.install("--quiet", "--editable", ".[test]")
    if session.posargs:
        session.run("python", "-m", "pytest", *session.posargs)
    else:
        session.run("python", "-m", "pytest", "--numprocesses=auto", "scripts", "tests/unit")
        session.run(
            "python", "-m", "pytest", "tests/integration"
        )  # one by one: compilers take all cores and the memory


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

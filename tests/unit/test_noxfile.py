from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nox.project
from packaging.requirements import Requirement

from scripts.commands.table import COMMANDS
from tests.unit.conftest import ROOT


def test_a_session_s_answer_is_alone_on_stdout() -> None:
    """``nox -s NAME -- --json > answer.json`` is JSON: what nox and people are told goes elsewhere."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [
        sys.executable,
        "-m",
        "nox",
        "--force-venv-backend",
        "none",
        "--no-install",
        "-s",
        "lint",
        "--",
        "--json",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    json.loads(done.stdout)
    assert "Session lint was successful" in done.stderr


def test_every_command_is_a_session() -> None:
    names = [command.name for command in COMMANDS]
    command = [sys.executable, "-m", "nox", "--list", "--json", "--session", *names]
    listed = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    lines = {session["name"]: session["description"] for session in listed}
    assert lines.keys() == {*names, "commands", "developers"}, "and the environments that they share"
    described = {entry.name: f"{entry.line}." for entry in COMMANDS if entry.name != "lint"}
    assert described.items() <= lines.items()


def test_the_groups_that_commands_and_developers_need_are_there() -> None:
    pyproject = nox.project.load_toml(ROOT / "pyproject.toml")
    needed = {entry.dependencies for entry in COMMANDS if entry.dependencies}
    needed |= {group for entry in COMMANDS for group in entry.option_dependencies.values()}
    assert needed == {
        "cluster",
        "comparing",
        "containers",
        "cpp",
        "guards",
        "index",
        "inspecting",
        "pictures",
        "releasing",
        "signing",
    }
    for group in (*needed, "test", "lint"):
        assert nox.project.dependency_groups(pyproject, group)
    named = [Requirement(line).name for line in nox.project.dependency_groups(pyproject, "test", "lint")]
    assert {"matplotlib", "pytest", "sigstore", "zstandard"} <= {*named}


def test_the_noxfile_needs_nothing_but_nox() -> None:
    """Nox loads it in an environment without the build system's requirements."""
    code = "import sys; import scripts.commands.table; print(*sys.modules)"
    command = [sys.executable, "-S", "-c", code]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {name.partition(".")[0] for name in loaded} <= {*sys.stdlib_module_names, "scripts", "__main__"}

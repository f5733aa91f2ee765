"""What docs/architecture.md says of the modules is so."""

from __future__ import annotations

import ast
import re
import sys

from tests.unit.conftest import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
SOURCES = {
    path.relative_to(ROOT / "scripts").with_suffix("").as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "scripts").rglob("*.py"))
}


def rows(title: str) -> list[str]:
    """The first cells of the table under a heading, without the table's own head."""
    section = re.split(r"^##+ ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return [cell for cell in re.findall(r"^\| (.+?) \|", section, re.MULTILINE) if cell.startswith("`")]


def named(title: str) -> set[str]:
    """The modules that those cells name."""
    return set(re.findall(r"`([\w/]+)`", " ".join(rows(title))))


def imported(tree: ast.Module) -> set[str]:
    return {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}


def test_every_module_of_a_room_is_in_its_table() -> None:
    rooms: dict[str, set[str]] = {}
    for folder, _, module in (name.rpartition("/") for name in SOURCES):
        if folder and module != "__init__":
            rooms.setdefault(folder, set()).add(module)
    assert set(rooms) == named("The rooms")
    for room, modules in rooms.items():
        if room == "commands":
            continue  # they have the names of commands
        assert f"\n### {room}\n" in PAGE, room
        assert named(room) == modules, room


def test_the_figures_of_the_rooms_are_the_contracts_of_imports() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [contract["layers"] for contract in contracts["contracts"] if contract["type"] == "layers"]
    figures = re.findall(r"^```\n(.+?)^```", PAGE.split("# The rooms\n", 1)[1], re.MULTILINE | re.DOTALL)
    rooms, inside = ([re.split(r" {2,}", line) for line in figure.splitlines()] for figure in figures[:2])
    assert [line[0] for line in rooms] == [name.removeprefix("scripts.") for name in layers[0]]
    assert inside == [name.split(" | ") for name in layers[1]]


def test_the_modules_that_start_programs_are_those_of_the_table() -> None:
    starting = {name for name, tree in SOURCES.items() if "subprocess" in imported(tree)}
    assert starting == named("Who runs programs, and who prints") | {"base/process"}
    assert {name for name, tree in SOURCES.items() if "git" in imported(tree)} == {"base/git"}


def test_only_commands_make_tables() -> None:
    tables = {
        name
        for name, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "rich.table"
    }
    assert {name.split("/")[0] for name in tables} == {"commands"}

"""How long modules and functions of the build system may be; ruff holds branches and parameters (pyproject.toml)."""

from __future__ import annotations

import ast

import pytest

from tests.unit.conftest import ROOT

MODULE, FUNCTION = 300, 50  # lines; a function's from def to its end, docstring and all
MODULES = [*sorted((ROOT / "scripts").rglob("*.py")), ROOT / "noxfile.py"]


def too_long(name: str, text: str) -> list[str]:
    """What of a module has too many lines: itself, and functions."""
    lines = len(text.splitlines())
    found = [f"{name} has {lines} lines; at most {MODULE}"] if lines > MODULE else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION:
                found.append(f"{name}: {node.name} has {lines} lines; at most {FUNCTION}")
    return found


def test_modules_and_functions_are_read_in_a_few_minutes() -> None:
    assert len(MODULES) > 50
    assert [
        mistake
        for path in MODULES
        for mistake in too_long(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n" * 300, []),
        ("x = 1\n" * 301, ["m.py has 301 lines; at most 300"]),
        ("def f():\n" + "    x = 1\n" * 49, []),
        ("def f():\n" + "    x = 1\n" * 50, ["m.py: f has 51 lines; at most 50"]),
        ("class C:\n    async def f(self):\n" + "        x = 1\n" * 50, ["m.py: f has 51 lines; at most 50"]),
    ],
)
def test_a_line_too_many_is_told(text: str, expected: list[str]) -> None:
    assert too_long("m.py", text) == expected

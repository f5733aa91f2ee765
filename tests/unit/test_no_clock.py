"""Tests wait for events: how fast a machine is decides none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from hypothesis import settings

from scripts.base import layout

TESTS = layout.ROOT / "tests"
LEAST = 300  # seconds: what hangs takes them, and no test that works does
SLEEPS = {
    "unit/waiting.py": "it looks again every 20 ms",
    "integration/test_real_remote_cache.py": "a server tells no event; it is asked again",
    "wheel/prove_sglang.py": "SGLang tells no event; it is asked again",
}
WORDS = re.compile(r"timeout|seconds|sleep|deadline|_profile|\.(wait|result)\(")  # parsing all takes long
PROFILE = "emulator/steady.py"
FACTS = {"Taken"}  # what has seconds and waits for nothing


def number(node: ast.expr) -> float | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else None


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def dotted(node: ast.expr) -> str:
    """What is called, as it is written; no more than the end of what is longer than two names."""
    if isinstance(node, ast.Attribute):
        return f"{node.value.id if isinstance(node.value, ast.Name) else ''}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def mistakes(text: str, name: str) -> Iterator[str]:
    """What a clock would decide in a file."""
    for node in ast.walk(ast.parse(text)) if WORDS.search(text) else ():
        if isinstance(node, ast.ImportFrom) and node.module == "time" and name not in SLEEPS:
            yield from (f"{node.lineno}: sleep" for alias in node.names if alias.name == "sleep")
        if not isinstance(node, ast.Call):
            continue
        called, given = dotted(node.func), {word.arg: word.value for word in node.keywords}
        last = called.rpartition(".")[2]
        limits = [value for word, value in given.items() if word in ("timeout", "seconds")]
        limits += node.args[:1] if last in ("wait", "result") else []
        if last not in FACTS and any((limit := number(v)) is not None and limit < LEAST for v in limits):
            yield f"{node.lineno}: {called} waits less than {LEAST} s"
        if called == "time.sleep" and name not in SLEEPS:
            yield f"{node.lineno}: time.sleep"
        if last == "settings" and "deadline" in given and not is_none(given["deadline"]):
            yield f"{node.lineno}: settings with a deadline"
        if last in ("register_profile", "load_profile") and name != PROFILE:
            yield f"{node.lineno}: a profile of its own"


def test_no_clock_decides_a_test() -> None:
    files = {str(path.relative_to(TESTS)): path for path in sorted(TESTS.rglob("*.py"))}
    found = [
        f"tests/{name}:{line}" for name, path in files.items() for line in mistakes(path.read_text(), name)
    ]
    assert found == []
    assert {*SLEEPS, PROFILE} <= files.keys(), "an exception for a file that is gone"


def test_the_profile_of_hypothesis_is_the_shared_one() -> None:
    assert settings.get_current_profile_name() == "steady"
    assert settings().deadline is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("process.wait(timeout=60)", "1: process.wait waits less than 300 s"),
        ("process.wait(60)", "1: process.wait waits less than 300 s"),
        ("until(done, 'it', seconds=2.5)", "1: until waits less than 300 s"),
        ("\ntime.sleep(1)", "2: time.sleep"),
        ("from time import sleep", "1: sleep"),
        ("@settings(deadline=200)\ndef test(): ...", "1: settings with a deadline"),
        ("settings.load_profile('mine')", "1: a profile of its own"),
    ],
)
def test_a_clock_is_found(text: str, said: str) -> None:
    assert [*mistakes(text, "unit/test_it.py")] == [said]


@pytest.mark.parametrize(
    "text",
    [
        "process.wait(PATIENCE)",
        "process.wait(timeout=600)",
        "Taken(seconds=3)",
        "'time.sleep(1)'",
        "@settings(deadline=None)\ndef test(): ...",
    ],
)
def test_what_is_no_clock_is_left_alone(text: str) -> None:
    assert [*mistakes(text, "unit/test_it.py")] == []

"""Our own Python in wheels: the oldest Python that runs it, and names that two of its modules must agree on."""

from __future__ import annotations

import ast
import configparser
import os
import subprocess
from pathlib import Path

import pytest

from scripts.base.errors import ToolchainError
from scripts.wheels.packing import metadata
from scripts.wheels.toolchain import compilers
from tests.unit.conftest import ROOT

HALVES = ("flash-attn", "flash-attn-4")
OLDEST = "3.10"  # that the wheels serve
# What tells people of a Python that no wheel serves runs on it.
OLDER = "3.7"
ALONE = ("flash_attn/cpp/", "flash_attn/doctor/", "flash_attn/fork_start.py")
# Compiles files, without writing, and runs nothing of them.
COMPILE = (
    "import sys\nfrom pathlib import Path\nfor p in sys.argv[1:]: compile(Path(p).read_bytes(), p, 'exec')"
)


def modules(version: str) -> list[Path]:
    """Files of which that is the oldest Python."""
    found = []
    for half in HALVES:
        root = ROOT / "fork" / half
        for path in sorted(root.rglob("*.py")):
            alone = path.relative_to(root).as_posix().startswith(ALONE)
            found += [path] if alone == (version == OLDER) else []
    return found


def python(version: str) -> Path:
    try:
        return compilers.find_python(version)
    except ToolchainError:
        return pytest.skip(f"no python{version} here")


@pytest.mark.parametrize("version", [OLDEST, OLDER])
def test_modules_are_of_the_oldest_python_s_grammar(version: str) -> None:
    """As far as this Python knows it; the next test asks the other one."""
    assert len(modules(version)) > 5
    minor = int(version.partition(".")[2])
    for path in modules(version):
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, minor))


@pytest.mark.parametrize("version", [OLDEST, OLDER])
def test_the_oldest_python_compiles_them(version: str) -> None:
    done = subprocess.run(
        [python(version), "-W", "error", "-c", COMPILE, *modules(version)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_programs_run_on_a_python_that_no_wheel_serves(tmp_path: Path) -> None:
    package = ROOT / "fork/flash-attn/flash_attn"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    told = {
        program: subprocess.run(
            [python(OLDER), package / program, *options],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        for program, options in (("doctor", ["--no-import"]), ("cpp", ["--library"]), ("fork_start.py", []))
    }
    assert f"this machine: Python {OLDER}" in told["doctor"].stdout
    assert "flash_attn is not installed" in told["doctor"].stdout
    assert "libflash_attention_v2.so.1 is missing" in told["cpp"].stderr
    assert [done.returncode for done in told.values()] == [1, 1, 0]


def test_types_are_checked_at_the_oldest_python_that_wheels_serve() -> None:
    """That flash_attn_4's says the same, tests/integration/test_real_python_wheel.py shows."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "fork/mypy.ini")
    assert settings["mypy"]["python_version"] == OLDEST
    assert metadata._REQUIRES_PYTHON.removeprefix(">=") == OLDEST
    for section in settings.sections():
        for module in section.removeprefix("mypy-").split(",") if "flash_attn" in section else []:
            assert (ROOT / "fork/flash-attn-4" / f"{module.replace('.', '/')}.py").is_file()


def parameters(path: str) -> dict[str, list[str]]:
    """By function, the names of its arguments that may go by place."""
    tree = ast.parse((ROOT / "fork/flash-attn" / path).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: [arg.arg for arg in node.args.args] for node in functions}


@pytest.mark.parametrize(
    ("name", "signature", "more"),
    [
        ("fwd", "forward", []),
        ("varlen_fwd", "varlen_forward", []),
        ("bwd", "fork_bwd", []),
        ("varlen_bwd", "fork_varlen_bwd", []),
        ("fork_fwd_kvcache", "fwd_kvcache", ["wants_lse"]),
    ],
)
def test_calls_on_the_other_kernels_have_the_arguments_of_our_own(
    name: str, signature: str, more: list[str]
) -> None:
    """They go by place; what is not served is found by name."""
    scores = ["attn_mask", "attn_bias", "learnable_sink"] if name in ("fwd", "varlen_fwd") else []
    own = parameters("flash_attn_2_cuda/__init__.py")[signature]
    assert parameters("flash_attn/fork_fa4.py")[name] == [p for p in own if p not in scores] + more

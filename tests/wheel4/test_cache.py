"""The key of a compiled kernel follows from all that it is made of."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import machine
import pytest
from flash_attn import cute

KEY = """
from flash_attn.cute import cache_utils
cache = cache_utils.get_jit_cache("fwd")
print(cache.cache_path.parent.name, cache._key_to_hash((1, "a")))
"""
_PLAIN: list[tuple[str, str]] = []


@pytest.fixture
def key(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """The folder and the name of a kernel, in a process with another environment; and code to run before."""

    def ask(before: str = "", path: Path | None = None, **environment: str) -> tuple[str, str]:
        cache = {
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path / "kernels"),
        }
        env = {**os.environ, **environment, **cache}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path or ""), os.environ.get("PYTHONPATH", "")]))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", before + KEY],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        folder, name = done.stdout.splitlines()[-1].split()  # upstream's log goes to stdout too
        return folder, name

    return ask


@pytest.fixture
def plain(key: Callable[..., tuple[str, str]]) -> tuple[str, str]:
    """The key of a process with nothing changed, asked for once: a process takes seconds to start."""
    if not _PLAIN:
        _PLAIN.append(key())
    return _PLAIN[0]


def test_the_same_again_is_found(key: Callable[..., tuple[str, str]], plain: tuple[str, str]) -> None:
    assert key() == plain


def test_another_architecture_has_other_kernels(key: Callable[..., tuple[str, str]]) -> None:
    one, other = (key(**machine.environment_for(name)) for name in ("sm_90", "sm_100"))
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_kernels_that_print_are_others(key: Callable[..., tuple[str, str]], plain: tuple[str, str]) -> None:
    assert plain[1] != key(FA_LOG_LEVEL="2")[1]


@pytest.mark.parametrize(
    "before",
    [
        "import quack; quack.__version__ = '0'\n",
        "import cutlass; cutlass.CUDA_VERSION = '12.9'\n",
        "import os; os.environ['CUTE_DSL_COMPILER_OPT'] = 'other'\n",
    ],
    ids=["quack", "cuda", "options"],
)
def test_another_toolchain_has_another_folder(
    key: Callable[..., tuple[str, str]], plain: tuple[str, str], before: str
) -> None:
    assert plain[0] != key(before)[0]


def test_a_changed_source_has_another_folder(
    key: Callable[..., tuple[str, str]], plain: tuple[str, str], tmp_path: Path
) -> None:
    package = tmp_path / "flash_attn/cute"
    shutil.copytree(Path(cute.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    same = key(path=tmp_path)
    (package / "softmax.py").write_bytes((package / "softmax.py").read_bytes() + b"\n# changed\n")
    assert same == plain
    assert key(path=tmp_path)[0] != same[0]

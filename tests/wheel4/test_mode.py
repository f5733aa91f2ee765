"""The mode's Python surface, alone and beside a flash_attn that keeps the mode."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import machine
import pytest
import torch
from calls import dense, dense_gradients
from flash_attn import cute
from flash_attn.cute import deterministic_mode
from mode_rules import *  # noqa: F403 - the cases of the mode, which find the fixtures below
from mode_rules import VARIABLES, Process
from problems import Config, draw
from without_values import compiling

# It loads a part of flash_attn.cute that needs neither CUTLASS nor torch, so that a process takes little time.
MODE = "import sys, types, importlib.util as u\np = types.ModuleType('flash_attn.cute')\np.__path__ = {path!r}\nsys.modules['flash_attn.cute'] = p\nfrom flash_attn.cute import fork_mode as f, fork_log\n"


def run_python(code: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code after the mode's import; ``path``: a folder with another flash_attn."""
    found = [str(path), *sys.path] if path else sys.path
    env = {
        **os.environ,
        **dict.fromkeys(VARIABLES, ""),
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, found)),
    }
    words = [sys.executable, "-c", MODE.format(path=list(cute.__path__)) + code]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def package() -> ModuleType:
    return cute


@pytest.fixture
def in_process() -> Process:
    return run_python


def test_import_needs_neither_torch_nor_an_extension() -> None:
    done = run_python("print(sorted({'torch', 'flash_attn_2_cuda', 'cutlass'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


WATCH = """
import sys, traceback, torch
start, files = torch.cuda._lazy_init, []
def watched():
    files.extend(frame.filename for frame in traceback.extract_stack())
    return start()
torch.cuda._lazy_init = watched
import flash_attn.cute
print(sorted({name for name in files if "fork_" in name}), torch.cuda.is_initialized())
"""


def test_importing_the_package_starts_no_cuda_of_its_own() -> None:
    """Where there is a GPU, quack-kernels 0.6.5 starts it at import; the fork's files do not."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WATCH], capture_output=True, text=True, check=True
    )
    files, started = done.stdout.strip().rsplit(maxsplit=1)
    assert files == "[]"
    assert started == str(machine.GPU)


@pytest.fixture
def beside(tmp_path: Path) -> Callable[[str], Path]:
    """A folder with a flash_attn whose determinism.py has this text; of ``-``, it has none."""

    def make(text: str) -> Path:
        package = tmp_path / "flash_attn"
        package.mkdir()
        (package / "__init__.py").touch()
        if text != "-":
            (package / "determinism.py").write_text(text)
        return tmp_path

    return make


NAMES = (
    "DeterministicMode = deterministic_mode = get_deterministic_mode = set_deterministic_mode = 'its own'\n"
)


def test_flash_attn_s_switch_is_this_one(beside: Callable[[str], Path]) -> None:
    done = run_python("print(f.SHARED, f.set_deterministic_mode)", beside(NAMES))
    assert done.stdout.strip() == "True its own", done.stderr


@pytest.mark.parametrize(
    "text", ["-", "import flash_attn_2_cuda\n"], ids=["upstream's", "without its extension"]
)
def test_beside_a_flash_attn_without_a_mode_it_keeps_its_own(
    beside: Callable[[str], Path], text: str
) -> None:
    done = run_python(
        "print(f.SHARED, tuple(f.get_deterministic_mode()))", beside(text), FA2_DETERMINISTIC="1"
    )
    assert done.stdout.strip() == "False (True, 2048)", done.stderr


def test_another_module_that_flash_attn_misses_is_not_passed_over(beside: Callable[[str], Path]) -> None:
    done = run_python("", beside("import no_such_module\n"))
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stderr


def test_a_call_prints_a_line_with_its_shapes_and_mode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_attn.cute import fork_log

    monkeypatch.setattr(fork_log, "DEBUG", True)
    config = Config(64, heads=2, heads_k=1)
    with compiling(), deterministic_mode(split_size=512):
        dense(config, [draw(config, 128, 256)])
    first = capsys.readouterr().err.splitlines()[0]
    assert first == (
        "[flash-attn] cute.flash_attn_fwd: q=(1, 128, 2, 64) k=(1, 256, 1, 64) v=(1, 256, 1, 64) "
        "deterministic_mode=1 split_size=512"
    )
    with compiling():
        dense_gradients(config, [draw(config, 128, 256)])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("[flash-attn]")] == [
        "cute.flash_attn_fwd:",
        "cute.flash_attn_bwd:",
    ]
    assert "deterministic_mode=0 split_size=2048" in lines[-1]
    monkeypatch.setattr(fork_log, "DEBUG", False)
    with compiling(), torch.no_grad():
        dense(config, [draw(config, 128, 256)])
    assert "[flash-attn]" not in capsys.readouterr().err

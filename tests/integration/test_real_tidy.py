"""Our own C++ and CUDA, by clang-tidy: .clang-tidy says what it looks for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.base import layout

pytestmark = [pytest.mark.network, pytest.mark.nvcc, pytest.mark.in_turn(5)]

# Kernel files that reach all headers of ours.
KERNELS = (
    "flash_fwd_hdim64_fp16_causal_sm80.cu",
    "flash_fwd_split_hdim64_fp16_causal_sm80.cu",
    "flash_bwd_hdim64_fp16_causal_sm80.cu",
)


def told(*words: str | Path) -> list[str]:
    """Of files of ours; clang takes some of upstream's lines for errors, and goes on."""
    program = Path(sys.executable).with_name("clang-tidy")
    command = [program, "--quiet", f"--config-file={layout.ROOT / '.clang-tidy'}", "-p", layout.BUILD, *words]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    ours = r"(?m)^\S*/(?:fork_\w+|(?:core|api)/\w+)\.\w+:\d+:\d+: (?:warning|error): .*"
    return re.findall(ours, found)


@pytest.fixture(scope="module", autouse=True)
def applied() -> None:
    subprocess.run([sys.executable, "-m", "scripts", "apply"], cwd=layout.ROOT, check=True)


def test_it_finds_nothing_in_what_runs_on_the_host() -> None:
    own = layout.ROOT / "fork/flash-attn/csrc/flash_attn"
    known = {Path(one["file"]) for one in json.loads((layout.BUILD / "compile_commands.json").read_text())}
    files = sorted(
        path for part in ("api", "core") for path in (own / part).iterdir() if path.suffix in {".cpp", ".cu"}
    )
    assert len(files) >= 14
    assert set(files) <= known
    assert told(*files) == []


@pytest.mark.parametrize("name", KERNELS)
def test_it_finds_nothing_in_what_kernels_are_made_of(name: str) -> None:
    assert told(layout.SOURCE / "csrc/flash_attn/src" / name) == []


def test_it_would_find_a_mistake(tmp_path: Path) -> None:
    mistaken = tmp_path / "fork_mistaken.cpp"
    mistaken.write_text("int first(const int *p) { return p[0] - p[0]; }\n", encoding="utf-8")
    (found,) = told(mistaken, "--", "-std=c++17")
    assert "misc-redundant-expression" in found

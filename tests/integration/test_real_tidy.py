"""Our own C++ and CUDA, by clang-tidy: .clang-tidy says what it looks for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.base import layout
from tests.integration.wheels import said

pytestmark = [pytest.mark.network, pytest.mark.nvcc, pytest.mark.in_turn(5)]

# Kernel files that, with those of the host, reach all headers of ours.
KERNELS = (
    "flash_fwd_hdim64_fp16_causal_sm80.cu",
    "flash_fwd_split_hdim64_fp16_causal_sm80.cu",
    "flash_bwd_hdim64_fp16_causal_sm80.cu",
)


def told(*words: str | Path) -> list[str]:
    """Of files of ours; clang takes some of upstream's lines for errors, and goes on."""
    program = Path(sys.executable).with_name("clang-tidy")
    command = [program, "--quiet", f"--config-file={layout.ROOT / '.clang-tidy'}", "-p", layout.BUILD, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = done.stdout
    unread = re.search(r"file not found|too many errors|Stack dump", found + done.stderr)
    assert unread is None, f"clang did not read all of it: {unread and unread[0]}"
    ours = r"(?m)^\S*/(?:fork_\w+|(?:core|api)/\w+)\.\w+:\d+:\d+: (?:warning|error): .*"
    return re.findall(ours, found)


@pytest.fixture(scope="module", autouse=True)
def applied() -> None:
    said("apply")


def test_it_finds_nothing_in_what_runs_on_the_host_and_what_kernels_are_made_of() -> None:
    own = layout.ROOT / "fork/flash-attn/csrc/flash_attn"
    known = {Path(one["file"]) for one in json.loads((layout.BUILD / "compile_commands.json").read_text())}
    files = sorted(
        path for part in ("api", "core") for path in (own / part).iterdir() if path.suffix in {".cpp", ".cu"}
    )
    assert len(files) >= 14
    assert set(files) <= known
    # Kernels first, which take longest.
    files = [*(layout.SOURCE / "csrc/flash_attn/src" / name for name in KERNELS), *files]
    with ThreadPoolExecutor(2) as pool:
        assert dict(zip(files, pool.map(told, files), strict=True)) == {path: [] for path in files}


def test_it_would_find_a_mistake(tmp_path: Path) -> None:
    mistaken = tmp_path / "fork_mistaken.cpp"
    mistaken.write_text("int first(const int *p) { return p[0] - p[0]; }\n", encoding="utf-8")
    (found,) = told(mistaken, "--", "-std=c++17")
    assert "misc-redundant-expression" in found
    mistaken.write_text(
        '#include "gone.h"\nint first(const int *p) { return p[0] - p[0]; }\n', encoding="utf-8"
    )
    with pytest.raises(AssertionError, match=r"did not read all of it: file not found"):
        told(mistaken, "--", "-std=c++17")

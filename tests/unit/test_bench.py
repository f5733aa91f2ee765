from __future__ import annotations

import dataclasses
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts import bench
from scripts.bench import Ours, Side, Spent

OURS = Ours(Side(Spent(600, 320), Spent(30, 30), 1_000_000), Spent(500, 260), Spent(31, 33), Spent(1, 3), 0, 0.0)
THEIRS = Side(Spent(1200, 700), Spent(40, 40), 4_000_000)


def figures(theirs: Side = THEIRS, **changed: object) -> dict[str, bench.Line]:
    return {line.what: line for line in bench.lines(dataclasses.replace(OURS, **changed), theirs)}


def test_figures_are_ratios_to_upstream_of_the_same_files_and_of_a_matrix() -> None:
    found = figures()
    assert found["nvcc, these kernel files"].value == 0.5
    matrix = found["nvcc, 16 wheels of one CUDA (and g++)"]
    assert (matrix.ours, matrix.upstream) == ("600 (and 480) CPU s", "19200 (and 640) CPU s")
    assert found["extension, deflated"].value == 0.25
    assert found["nvcc, for masks and biases"].value == 1.2
    assert all(line.met for line in found.values())


def test_kernels_without_masks_and_biases_are_not_held_against_themselves() -> None:
    assert figures().keys() - figures(without_bias=None).keys() == {"nvcc, for masks and biases"}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"theirs": Side(Spent(900, 500), Spent(40, 40), 4_000_000)}, "nvcc, these kernel files"),
        ({"theirs": Side(Spent(1200, 700), Spent(40, 40), 1_200_000)}, "extension, deflated"),
        ({"without_bias": Spent(470, 260)}, "nvcc, for masks and biases"),
        ({"further": Spent(80, 91)}, "a further torch or Python, installed"),
        ({"again": Spent(5, 5.5)}, "nothing changed"),
        ({"recompiled": 1}, "flash_api.cpp changed: kernel files compiled"),
        ({"share": 1 / 72}, "nvcc, 16 wheels of one CUDA (and g++)"),
    ],
)
def test_a_goal_that_is_missed_is_called_so(changed: dict[str, object], missed: str) -> None:
    assert [what for what, line in figures(**changed).items() if not line.met] == [missed]


def test_the_time_of_processes_that_a_block_starts_is_counted_and_no_other() -> None:
    spent: list[Spent] = []
    burn = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", burn.format(0.2)], check=True)
    with bench._spending(spent):
        subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{burn.format(0.5)}"'], check=True)
    assert 0.5 <= spent[0].cpu_seconds < 5
    assert spent[0].seconds > 0


def test_compilers_of_upstream_s_build_end_when_it_is_interrupted(tmp_path: Path) -> None:
    ninja = shutil.which("ninja", path=str(Path(sys.executable).parent)) or "ninja"
    (tmp_path / "build.ninja").write_text("rule wait\n  command = echo begun && touch begun && sleep 60 && touch late\nbuild late: wait\n")
    code = f"""
import signal
from pathlib import Path
from types import SimpleNamespace
from scripts import bench
signal.signal(signal.SIGINT, signal.default_int_handler)
tools = SimpleNamespace(ninja={ninja!r}, environment=SimpleNamespace(cuda=()))
bench._run_ninja(SimpleNamespace(toolchain=tools), Path({str(tmp_path)!r}) / "build.ninja", ["late"], 1, Path({str(tmp_path)!r}) / "log")
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) != 0
    waiting = [p for p in psutil.process_iter(["cwd", "name"]) if p.info["name"] == "sleep" and p.info["cwd"] == str(tmp_path)]
    assert waiting == []

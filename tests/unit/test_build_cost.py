from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from scripts.base.errors import CompileError
from scripts.lab import build_cost, build_figures, metering
from scripts.lab.build_figures import Ours, Side, Spent
from tests.unit.waiting import PATIENCE, until

OURS = Ours(
    Side({"fwd": 200, "bwd": 400}, 30, 1_000_000),
    {"fwd": 170, "bwd": 330},
    Spent(31, 33),
    Spent(1, 3),
    0,
    0.0,
)
THEIRS = Side({"fwd": 300, "bwd": 900}, 40, 4_000_000)


def figures(theirs: Side = THEIRS, **changed: Any) -> dict[str, build_figures.Line]:
    return {line.what: line for line in build_figures.lines(dataclasses.replace(OURS, **changed), theirs)}


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
        ({"theirs": Side({"fwd": 400, "bwd": 500}, 40, 4_000_000)}, "nvcc, these kernel files"),
        ({"theirs": Side({"fwd": 300, "bwd": 900}, 40, 1_200_000)}, "extension, deflated"),
        ({"without_bias": {"fwd": 160, "bwd": 310}}, "nvcc, for masks and biases"),
        ({"further": Spent(80, 91)}, "a further torch or Python, installed"),
        ({"again": Spent(5, 5.5)}, "nothing changed"),
        ({"recompiled": 1}, "flash_api.cpp changed: kernel files compiled"),
        ({"share": 1 / 72}, "nvcc, 16 wheels of one CUDA (and g++)"),
    ],
)
def test_a_goal_that_is_missed_is_called_so(changed: dict[str, Any], missed: str) -> None:
    assert [what for what, line in figures(**changed).items() if not line.met] == [missed]


def test_the_time_of_processes_that_a_block_starts_is_counted_and_no_other() -> None:
    spent: list[Spent] = []
    burn = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", burn.format(0.2)], check=True)
    with build_cost._spending(spent):
        subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{burn.format(0.5)}"'], check=True)
    assert 0.5 <= spent[0].cpu_seconds < 50
    assert spent[0].seconds > 0


def test_a_file_is_compiled_on_all_sides_before_the_next_and_each_side_begins_in_turn() -> None:
    ours, theirs = (tuple(f"{side}{i}" for i in range(3)) for side in ("our", "their"))
    assert metering.side_by_side([ours, theirs]) == ["our0", "their0", "their1", "our1", "our2", "their2"]  # type: ignore[list-item, comparison-overlap]


def plan() -> Any:
    ninja = shutil.which("ninja", path=str(Path(sys.executable).parent)) or "ninja"
    return SimpleNamespace(toolchain=SimpleNamespace(ninja=ninja, environment=SimpleNamespace(cuda=())))


def compiling(folder: Path, name: str, command: str) -> metering.Compile:
    return metering.Compile("ours", name, f"cd {folder} && {command}", folder / f"{name}.o", 1)


BURN = "import time; all(time.process_time() < 0.4 for _ in iter(int, 1))"


def test_compiles_run_in_their_order_and_each_is_metered_with_what_it_starts(tmp_path: Path) -> None:
    names = ["b", "a", "d", "c"]
    burn = f"sh -c \"'{sys.executable}' -c '{BURN}'\""
    compiles = [
        compiling(
            tmp_path,
            name,
            f"{burn if name == 'd' else 'true'} && echo {name} >> order && echo $HOME > {name}.o",
        )
        for name in names
    ]
    metering.meter(plan(), compiles, 1, tmp_path / "bench")
    assert (tmp_path / "order").read_text().split() == names
    assert (tmp_path / "a.o").read_text().strip() == os.environ["HOME"]  # a shell's variable stays one
    spent = metering.metered_seconds(tmp_path / "bench", compiles)
    assert 0.4 <= spent["d"] < 40
    assert all(0 <= spent[name] < spent["d"] for name in "bac")


def test_what_was_metered_before_is_not_compiled_again_unless_its_object_or_command_is_another(
    tmp_path: Path,
) -> None:
    def runs(extra: str = "") -> int:
        both = [
            compiling(tmp_path, name, f"echo >> {name}.runs && touch {name}.o{extra}") for name in ("a", "b")
        ]
        metering.meter(plan(), both, 2, tmp_path / "bench")
        return sum(path.read_text().count("\n") for path in tmp_path.glob("*.runs"))

    assert runs() == runs() == 2
    (tmp_path / "a.o").unlink()
    assert runs() == 3
    assert runs(" && true") == 5


def test_all_sides_of_a_file_are_metered_together_also_after_an_interruption(tmp_path: Path) -> None:
    def runs() -> str:
        ours = [
            compiling(tmp_path, name, f"echo our {name} >> runs && touch {name}.o") for name in ("a", "b")
        ]
        theirs = [
            metering.Compile(
                "upstream",
                name,
                f"cd {tmp_path} && echo their {name} >> runs && touch u{name}.o",
                tmp_path / f"u{name}.o",
                1,
            )
            for name in ("a", "b")
        ]
        metering.meter(plan(), metering.side_by_side([ours, theirs]), 1, tmp_path / "bench")
        return (tmp_path / "runs").read_text().replace("\n", "; ")

    assert runs() == "our a; their a; their b; our b; "
    (tmp_path / "ub.o").unlink()
    assert runs() == "our a; their a; their b; our b; their b; our b; "


def test_a_compile_that_fails_is_shown_and_not_metered_and_the_others_stay(tmp_path: Path) -> None:
    good, bad = (
        compiling(tmp_path, "good", "touch good.o"),
        compiling(tmp_path, "bad", "touch bad.o && echo no such header >&2 && exit 3"),
    )
    with pytest.raises(CompileError, match=r"(?s)no such header.*metered\.log"):
        metering.meter(plan(), [good, bad], 1, tmp_path / "bench")
    assert [path.name.split("-")[1] for path in (tmp_path / "bench/metered").iterdir()] == ["good"]


def test_compilers_of_both_sides_end_when_it_is_interrupted(tmp_path: Path) -> None:
    code = f"""
import signal
from pathlib import Path
from tests.unit import test_build_cost
signal.signal(signal.SIGINT, signal.default_int_handler)
folder = Path({str(tmp_path)!r})
one = test_build_cost.compiling(folder, "late", "touch begun && sleep 6000 && touch late.o")
test_build_cost.metering.meter(test_build_cost.plan(), [one], 1, folder / "bench")
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL
    ) as process:
        until((tmp_path / "begun").exists, "a compile", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) != 0
    waiting = [
        p
        for p in psutil.process_iter(["cwd", "name"])
        if p.info["name"] == "sleep" and p.info["cwd"] == str(tmp_path)
    ]
    assert waiting == []
    assert list((tmp_path / "bench/metered").iterdir()) == []

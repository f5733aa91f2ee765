from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from scripts.base.errors import CompileError
from scripts.lab import objects, shared_ptx
from scripts.source import matrix_tables
from scripts.wheels.compiling import compile_cache, flags, kernels, ninja
from tests.unit.conftest import KERNELS, source_tree, toolchain

CAPABILITIES = st.lists(st.sampled_from(matrix_tables.ARCHITECTURES), min_size=1, unique=True).map(
    lambda a: tuple(sorted(a, key=int))
)
SHARED = st.dictionaries(
    st.sampled_from(("80", "100")),
    st.lists(st.sampled_from(("86", "89", "90")), min_size=1, unique=True).map(tuple),
    max_size=1,
)


@given(CAPABILITIES, SHARED)
def test_each_compute_capability_gets_machine_code_once_from_ptx_no_later_than_itself(
    wanted: tuple[str, ...], shared: dict[str, tuple[str, ...]]
) -> None:
    shared = {base: others for base, others in shared.items() if all(int(o) > int(base) for o in others)}
    made = flags.front_halves(wanted, shared)
    assert sorted((a for group in made.values() for a in group), key=int) == list(wanted)
    for base, group in made.items():
        assert all(a == base or a in shared[base] for a in group)
        assert len(group) > 1 or group == (base,), "PTX of another for one alone saves nothing"


def test_options_of_nvcc() -> None:
    assert flags.gencode(("80", "90", "120"), {"80": ("90",)}) == [
        "-gencode=arch=compute_80,code=[sm_80,sm_90]",
        "-gencode=arch=compute_120,code=sm_120",
    ]


def test_a_kernel_that_differs_is_named_and_the_base_is_not_compared() -> None:
    own = {"80": {"f": b"1"}, "90": {"f": b"2", "g": b"3"}}
    assert shared_ptx.compare("a.cu", "80", own, own) == [shared_ptx.Comparison("a.cu", "80", "90", 2, ())]
    (found,) = shared_ptx.compare("a.cu", "80", {"80": {"f": b"x"}, "90": {"f": b"2", "g": b"4"}}, own)
    assert found.differing == ("g",)


@pytest.mark.parametrize("shared", [{}, {"90": {}}, {"90": {"f": b"2"}}], ids=str)
def test_kernels_that_are_not_there_are_no_agreement(shared: dict[str, dict[str, bytes]]) -> None:
    with pytest.raises(
        CompileError, match=r"a\.cu, sm_90: 2 kernels from its own PTX, [01] from that of compute_80"
    ):
        shared_ptx.compare("a.cu", "80", shared, {"90": {"f": b"2", "g": b"3"}})


def test_an_object_without_machine_code_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="no machine code"):
        objects.machine_code(Path(sys.executable).resolve())


@pytest.mark.parametrize(("keeps_from", "expected"), [("0.1", True), ("99", False)])
def test_what_the_compile_cache_cannot_keep_goes_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_from: str, expected: bool
) -> None:
    tools = toolchain(tmp_path, 'touch "$last"\n', cache=True)
    monkeypatch.setattr(compile_cache, "_SHARES_FROM", Version(keeps_from))
    planned = kernels.Plan(
        source_tree(tmp_path),
        tools,
        KERNELS[:1],
        ("80", "90"),
        tmp_path / "build",
        shared_ptx={"80": ("90",)},
    )
    ninja.write_ninja(tmp_path / "build.ninja", [(planned, kernels.kernel_units(planned))])
    command = (tmp_path / "build.ninja").read_text()
    assert "code=[sm_80,sm_90]" in command
    assert ("/sccache " in command) == expected
    alone = dataclasses.replace(planned, architectures=("90",))
    ninja.write_ninja(tmp_path / "build.ninja", [(alone, kernels.kernel_units(alone))])
    assert "/sccache " in (tmp_path / "build.ninja").read_text()

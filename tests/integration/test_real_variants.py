"""Which kernels an object has: none that its GPUs never run, few for rare calls, and for common ones those it had without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

from scripts.base import layout
from scripts.lab import compare, objects
from scripts.series import model
from scripts.source import kernel_set, matrix_tables
from scripts.wheels.compiling import flags
from tests.integration.wheels import applied, program, tools

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [pytest.mark.network, pytest.mark.nvcc]

# By turn: files that are compiled twice. Windows are not causal.
FILES = {2: "fwd,causal", 4: "bwd,causal", 8: "split,causal", 9: "fwd,full"}
BEFORE = "Leave out kernels that no GPU of the build would run"  # the first patch that takes kernels away
RARE = {"dropout", "local", "alibi", "softcap"}
CHANGED_SINCE = "fork_combine_kernel"  # it finds the head of each row since heads of a group share tiles
Kernels = Mapping[str, objects.Code]


def tile(name: str) -> str:
    """A kernel's traits: its tile's sizes and layout."""
    return name.partition("cutlass")[0].partition("traitsI")[2]


def is_rare(name: str) -> bool:
    """Whether it serves calls with a window, slopes, a softcap, dropout, a mask or a bias; or, of a cache, new keys or an uneven head dim."""
    flags = compare.template_flags(name)
    if flags is None:  # kernels that combine splits are for an even head dim, or for any
        return "32flash_fwd_splitkv_combine_kernel" in name and "Lb1EEE" in name
    cache = "24flash_fwd_splitkv_kernel" in name and ("append" in flags or "even_K" not in flags)
    return cache or "WithScores" in name or not RARE.isdisjoint(flags)


@pytest.fixture(
    scope="module", params=[pytest.param(f, marks=pytest.mark.in_turn(t)) for t, f in FILES.items()]
)
def code(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, Kernels, Kernels]:
    """Whether a file is of the backward pass; its kernels with the patches that take kernels away, and without."""
    subjects = [patch.subject for patch in model.read(layout.PATCHES / "flash-attn").patches]
    whole = applied()
    part = applied(tmp_path_factory.mktemp("before") / "source", count=subjects.index(BEFORE))
    wanted = kernel_set.parse_kernels(f"hdim32,fp16,{request.param}")
    (ours,), (before,) = (half.values() for half in compare.compiled([(whole, wanted), (part, wanted)], "90"))
    return request.param.startswith("bwd"), ours, before


def test_kernels_of_common_calls_are_byte_for_byte_what_they_were(
    code: tuple[bool, Kernels, Kernels],
) -> None:
    backward, ours, before = code
    idle = {
        tile(name) for name in ours if backward and "dropout" in (compare.template_flags(name) or ())
    }  # dropout's alone
    common = [
        name
        for name in before
        if not is_rare(name)
        and CHANGED_SINCE not in name
        and not (compare.template_flags(name) is not None and tile(name) in idle)
    ]
    assert len(common) >= 3
    assert [name for name in common if name not in ours or ours[name].text != before[name].text] == []


def test_kernels_of_rare_calls_are_fewer(code: tuple[bool, Kernels, Kernels]) -> None:
    ours, before = (
        {name for name in half if is_rare(name) and "WithScores" not in name} for half in code[1:]
    )  # masks and biases come after the patches that take kernels away
    assert ours - before == set()
    assert len(ours) <= 0.75 * len(before)


@pytest.mark.parametrize("code", [pytest.param(FILES[4], marks=pytest.mark.in_turn(4))], indirect=True)
def test_each_tile_size_of_the_backward_pass_is_for_dropout_or_for_none(
    code: tuple[bool, Kernels, Kernels],
) -> None:
    """Head dim 32 has a size for either; upstream's kernels of the other kind serve smaller GPUs, or no call."""
    found = []
    for half in code[1:]:
        dropout: dict[str, set[bool]] = defaultdict(set)
        for name in half:
            flags = compare.template_flags(name)
            if flags is not None and "WithScores" not in name:
                dropout[tile(name)].add("dropout" in flags)
        found.append(sorted(dropout.values(), key=sorted))
    assert found == [[{False}, {True}], [{False, True}, {False, True}]]


PROGRAM = """
#include "fork_gpus.h"
#include <cstdio>
using namespace FLASH_NAMESPACE::fork_gpus;
int main() {
    for (const Gpu &gpu : kGpus) { std::printf("%d%d ", gpu.major, gpu.minor); }
    constexpr Choice large = choice([](int max_smem_per_block, int, bool) { return max_smem_per_block >= 144 * 1024; });
    constexpr Choice sm8x = choice([](int, int, bool is_sm8x) { return is_sm8x; });
    std::printf("\\n%d%d %d%d", large.yes, large.no, sm8x.yes, sm8x.no);
}
"""


@pytest.mark.parametrize(
    ("architectures", "large", "sm8x"),
    [
        (["90"], "10", "01"),
        (["100"], "10", "01"),
        (["120"], "01", "01"),
        (["89"], "01", "10"),
        (["86"], "11", "10"),  # its code runs on an 8.7 too, which has as much shared memory as an 8.0
        (["80"], "11", "11"),
        (["90", "120"], "11", "01"),
        (["80", "90"], "11", "11"),
    ],
)
def test_what_the_compiler_knows_of_the_gpus(
    tmp_path: Path, architectures: list[str], large: str, sm8x: str
) -> None:
    folders = (applied().root / "csrc/flash_attn/src", *tools().toolkit.include)
    includes = [f"-I{folder}" for folder in folders]
    known, choices = program(PROGRAM, tmp_path, flags.for_gpus(architectures), *includes)
    assert (
        tuple(known.split())[: len(matrix_tables.ARCHITECTURES)] == matrix_tables.ARCHITECTURES
    )  # the order of FORK_ARCHITECTURES' bits
    assert choices.split() == [large, sm8x]

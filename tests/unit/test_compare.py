from __future__ import annotations

import pytest

from scripts.lab.compare import Difference, spell
from scripts.lab.objects import Code

TRAITS = "ILi64ELi64ELi256ELi4ELb0ELb0EN7cutlass6half_tE19Flash_kernel_traitsILi64ELi64ELi256ELi4ES3_EE"
BACKWARD = "ILi32ELi128ELi128ELi8ELi4ELi4ELi4ELb1ELb0EN7cutlass10bfloat16_tE19Flash_kernel_traitsILi32ELi128ELi128ELi8ES3_EE"


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        (
            f"_ZN5flash24flash_fwd_splitkv_kernelI23Flash_fwd_kernel_traits{TRAITS}Lb1ELb0ELb1ELb0ELb0ELb1ELb1ELb1EEEvNS_16Flash_fwd_paramsE",
            "flash_fwd_splitkv_kernel 64x64x256x4 causal alibi softcap split append",
        ),
        (
            f"_ZN5flash24flash_fwd_splitkv_kernelIN9fork_bias10WithScoresI23Flash_fwd_kernel_traits{TRAITS}EELb0ELb1ELb1ELb0ELb1ELb1ELb0ELb1EEEvNS_16Flash_fwd_paramsE",
            "flash_fwd_splitkv_kernel 64x64x256x4 mask or bias local alibi even_K softcap append",
        ),
        (
            f"_ZN5flash44flash_bwd_dq_dk_dv_loop_seqk_parallel_kernelI23Flash_bwd_kernel_traits{BACKWARD}Lb1ELb0ELb0ELb0ELb0ELb0ELb0EEEvNS_16Flash_bwd_paramsE",
            "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel 32x128x128x8x4x4x4 dropout",
        ),
        (
            f"_ZN5flash32flash_fwd_splitkv_combine_kernelI23Flash_fwd_kernel_traits{TRAITS}Li8ELi7ELb0EEEvNS_16Flash_fwd_paramsE",
            "flash_fwd_splitkv_combine_kernel 64x64x256x4 8 7 0",
        ),
        (
            f"_ZN5flash25flash_bwd_dot_do_o_kernelILb1E23Flash_bwd_kernel_traits{BACKWARD}EEvNS_16Flash_bwd_paramsE",
            "flash_bwd_dot_do_o_kernel 32x128x128x8x4x4x4 1",
        ),
        ("_Z5rightPf", "_Z5rightPf"),
    ],
)
def test_a_kernel_is_spelled_for_people(name: str, spelled: str) -> None:
    assert spell(name) == spelled


def code(text: bytes) -> Code:
    return Code(len(text), 32, 0, 0, 0, text)


def test_kernels_are_the_same_changed_gone_or_new() -> None:
    before = {name: code(text) for name, text in (("a", b"1"), ("b", b"2"), ("c", b"3"))}
    after = {name: code(text) for name, text in (("a", b"1"), ("b", b"other"), ("d", b"3"))}
    found = Difference("fwd", before, after)
    assert {kind: found.names(kind) for kind in ("same", "changed", "gone", "new")} == {
        "same": ["a"],
        "changed": ["b"],
        "gone": ["c"],
        "new": ["d"],
    }

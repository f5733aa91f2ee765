"""Kernels, as the masks of the fork's headers number them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.base.errors import UpstreamError
from scripts.source import kernel_set
from scripts.source.kernel_set import ALL_KERNELS, Kernel, Pass


@pytest.mark.parametrize(
    ("head_dim", "dtype", "causal", "bit"),
    [
        (32, "fp16", False, 0),
        (32, "fp16", True, 1),
        (32, "bf16", False, 2),
        (32, "bf16", True, 3),
        (64, "fp16", False, 4),
        (128, "bf16", True, 15),
        (256, "bf16", True, 23),
    ],
)
def test_a_kernel_has_the_bit_that_the_binding_looks_at(
    head_dim: int, dtype: str, causal: bool, bit: int
) -> None:
    """As ``fork_kernel_set.h`` counts: head dim, then dtype, then causal."""
    assert {Kernel(kind, head_dim, dtype, causal).bit for kind in Pass} == {bit}


def test_no_two_kernels_of_a_pass_have_the_same_bit() -> None:
    for kind in Pass:
        assert sorted(k.bit for k in ALL_KERNELS if k.kind is kind) == list(range(24))


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("flash_fwd_split_align_hdim64_fp16_sm80.cu", 'Pass.FWD_SPLIT_ALIGN: "fwd_split_align" to STEMS'),
        ("flash_bwd_hdim512_bf16_causal_sm80.cu", "add 512 to HEAD_DIMS"),
        ("flash_bwd_hdim512_bf16_causal_sm80.cu", '"flash_bwd_hdim512_bf16*_sm80.cu": "WHY" to LEFT_OUT'),
        ("flash_fwd_hdim64_e4m3_sm80.cu", 'add "e4m3" to DTYPES'),
        ("combine.cu", 'leave them out:  add "combine.cu": "WHY" to LEFT_OUT'),
    ],
)
def test_a_tree_with_a_kernel_file_that_is_not_known_is_refused_with_what_to_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, edit: str
) -> None:
    folder = tmp_path / kernel_set.FOLDER
    folder.mkdir(parents=True)
    for kernel in ALL_KERNELS:
        (folder / kernel.source).touch()
    kernel_set.require_known(tmp_path)
    (folder / name).touch()
    with pytest.raises(UpstreamError) as caught:
        kernel_set.require_known(tmp_path)
    assert f"1 kernel files that no wheel would have: {name}" in str(caught.value)
    assert edit in str(caught.value)
    monkeypatch.setitem(kernel_set.LEFT_OUT, name, "a test does without it")
    kernel_set.require_known(tmp_path)

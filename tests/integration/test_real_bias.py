"""attn_mask and attn_bias cost calls without them nothing: their kernels are those of a build that leaves both out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from scripts.base import layout
from scripts.lab import compare, objects
from scripts.series import clone
from scripts.source import kernel_set, matrix
from scripts.source.upstream import Source

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

FILES = [
    "fwd_hdim32_fp16_causal",
    "bwd_hdim32_fp16_causal",
    pytest.param("split_hdim32_fp16_causal", marks=pytest.mark.in_turn(3)),
]
Code = Mapping[str, Mapping[str, objects.Code]]  # by file and kernel


@pytest.fixture(scope="module")
def code(is_turn: Callable[..., bool]) -> tuple[Code, Code]:
    """With mask and bias, and without."""
    words = "hdim32,fp16,causal" if is_turn(3) else "hdim32,fp16,causal,fwd,bwd"
    _, applied = clone.apply(matrix.load(layout.MATRIX), Source.SDIST)
    ours, without = compare.compiled(
        [(applied, kernel_set.parse_kernels(kernels)) for kernels in (words, f"{words},no-bias")], "90"
    )
    return ours, without


@pytest.mark.parametrize("file", FILES)
def test_kernels_of_calls_without_are_byte_for_byte_those_of_a_build_without(
    code: tuple[Code, Code], file: str
) -> None:
    ours, without = (half[file] for half in code)
    assert len(without) > (10 if file.startswith("fwd") else 15)
    differ = [name for name, code in without.items() if name not in ours or ours[name].text != code.text]
    moved = [
        name
        for name in without
        if file.startswith("bwd") and {"alibi", "softcap"} <= set(compare.template_flags(name) or ())
    ]
    assert differ == moved  # they take the kernels of masks and biases, where there are any
    assert len(moved) == (2 if file.startswith("bwd") else 0)  # in order, or not


@pytest.mark.parametrize("file", FILES)
def test_only_kernels_of_their_own_are_added(code: tuple[Code, Code], file: str) -> None:
    ours, without = (half[file] for half in code)
    added = set(ours) - set(without)
    gradients = [name for name in added if "bias_gradient_kernel" in name]
    simple = [name for name in added if "Simple" in name]
    assert all("WithScores" in name for name in added.difference(gradients, simple))
    # For a head dim as large as the kernel's, and for less; for either with several splits, or a softcap; and with 128 rows.
    assert (
        len(added) - len(gradients) - len(simple) == {"fwd": 0, "split": 4, "bwd": 3}[file.partition("_")[0]]
    )
    assert (
        len(simple) == {"fwd": 1, "split": 0, "bwd": 2}[file.partition("_")[0]]
    )  # backward, in order or not
    assert len(gradients) == file.startswith("bwd")

"""Kernels, as the masks of the fork's headers number them."""

from __future__ import annotations

import pytest

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

"""attn_mask and attn_bias cost calls without them nothing: their kernels are those of a build that leaves both out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scripts.lab import compare, objects
from scripts.source import kernel_set
from tests.integration.wheels import applied

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

# By pass: the turn in which its file is compiled twice, and how many kernels of their own masks and biases add: for a head
# dim as large as the kernel's, and for less; for either with several splits, or a softcap; and with 128 rows. Then those that
# ask for little; backward there is one in order and one not.
TURNS = {"fwd": 2, "bwd": 4, "split": 8}
ADDED = {"fwd": (0, 1), "bwd": (3, 2), "split": (4, 0)}
Kernels = Mapping[str, objects.Code]


@pytest.fixture(
    scope="module", params=[pytest.param(p, marks=pytest.mark.in_turn(t)) for p, t in TURNS.items()]
)
def code(request: pytest.FixtureRequest) -> tuple[str, Kernels, Kernels]:
    """A pass, and its kernels with mask and bias, and without."""
    words = f"hdim32,fp16,causal,{request.param}"
    whole = applied()
    halves = compare.compiled(
        [(whole, kernel_set.parse_kernels(kernels)) for kernels in (words, f"{words},no-bias")], "90"
    )
    (ours,), (without,) = (half.values() for half in halves)
    return request.param, ours, without


def test_kernels_of_calls_without_are_byte_for_byte_those_of_a_build_without(
    code: tuple[str, Kernels, Kernels],
) -> None:
    kind, ours, without = code
    assert len(without) > (10 if kind == "fwd" else 15)
    differ = [name for name, code in without.items() if name not in ours or ours[name].text != code.text]
    moved = [
        name
        for name in without
        if kind == "bwd" and {"alibi", "softcap"} <= set(compare.template_flags(name) or ())
    ]
    assert differ == moved  # they take the kernels of masks and biases, where there are any
    assert len(moved) == (2 if kind == "bwd" else 0)  # in order, or not


def test_only_kernels_of_their_own_are_added(code: tuple[str, Kernels, Kernels]) -> None:
    kind, ours, without = code
    added = set(ours) - set(without)
    gradients = [name for name in added if "bias_gradient_kernel" in name]
    simple = [name for name in added if "Simple" in name]
    assert all("WithScores" in name for name in added.difference(gradients, simple))
    assert (len(added) - len(gradients) - len(simple), len(simple)) == ADDED[kind]
    assert len(gradients) == (kind == "bwd")

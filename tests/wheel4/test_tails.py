"""What lies past the end of a packed sequence: finite values there change no bit; NaN is not covered.

Kernels load whole tiles. Keys past a sequence's end are masked, and their values have a weight of 0: 0 times a finite
value adds nothing, and 0 times NaN is NaN. So it is in the release without our patches.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bits import Rows, assert_same_bits
from calls import Gradients, _differentiate, _int32, _offsets, _packed
from cases import LENGTH, neighbour, own
from flash_attn.cute import deterministic_mode, flash_attn_varlen_func, interface
from problems import Config
from ways import SPLIT, assert_same

pytestmark = pytest.mark.gpu

TAIL = 200  # tokens of a buffer behind its last sequence
SOME = [Config(64), Config(128, causal=True, heads=8, heads_k=2), Config(128, window=(300, 50)), Config(256)]
configs = pytest.mark.parametrize("config", SOME, ids=str)
modes = pytest.mark.parametrize("mode", [False, True], ids=["off", "on"])


def with_a_tail(config: Config, value: float) -> tuple[Rows, Gradients]:
    """Results and gradients of the last of two sequences, in buffers that hold this value behind it."""
    sequences = [neighbour(config, 300), own(config)]
    parts = []
    for name in ("q", "k", "v", "dout"):
        rows = [getattr(s, name) for s in sequences]
        parts.append(torch.cat([*rows, torch.full_like(rows[0][:TAIL], value)]))
    q, k, v, dout = parts
    begins, places = _packed(sequences)
    with torch.no_grad():
        out, lse = flash_attn_varlen_func(q, k, v, **places, return_lse=True, **config.options())
    grads = _differentiate(config, [q, k, v], dout, places, deterministic=True)
    keys = _offsets(len(s.k) for s in sequences)
    assert begins == keys
    mine = slice(*keys[1:])
    named = dict(zip("qkv", (grad[mine] for grad in grads), strict=True))
    return Rows(out[mine], lse[:, mine]), named


def with_unused_keys(config: Config, value: float) -> Rows:
    """A sequence's last queries, on a buffer that holds this value behind the keys that ``seqused_k`` says."""
    mine = own(config)
    k, v = (torch.cat([t, torch.full_like(t[:TAIL], value)])[None] for t in (mine.k, mine.v))
    out, lse = flash_attn_varlen_func(
        mine.q[-5:], k, v, cu_seqlens_q=_int32([0, 5]), max_seqlen_q=5, max_seqlen_k=LENGTH + TAIL,
        seqused_k=_int32([LENGTH]), return_lse=True, **config.options(),
    )  # fmt: skip
    return Rows(out, lse)


@modes
@configs
def test_finite_values_past_the_end_change_no_bit(config: Config, mode: bool) -> None:
    with deterministic_mode(mode, SPLIT):
        expected, gradients = with_a_tail(config, 0.0)
        found, others = with_a_tail(config, 7.0)
    assert_same(expected, found, "a tail")
    for name in "qkv":
        assert_same_bits(gradients[name], others[name], f"d{name}")


@modes
def test_finite_values_past_the_used_keys_change_no_bit(mode: bool) -> None:
    with deterministic_mode(mode, SPLIT):
        assert_same(with_unused_keys(SOME[1], 0.0), with_unused_keys(SOME[1], 7.0), "unused keys")


@modes
@configs
def test_control_nan_past_the_end_is_not_covered(config: Config, mode: bool, control: Any) -> None:
    """docs/contract.md says so. Here is told what it does; it may come to nothing in another version."""
    with deterministic_mode(mode, SPLIT):
        rows, gradients = with_a_tail(config, math.nan)
    control(bool(rows.out.isnan().any()), must_differ=False)
    control(any(bool(gradients[name].isnan().any()) for name in "qkv"), must_differ=False)


def poisoned_gradients(
    config: Config, tensors: list[torch.Tensor], dout: torch.Tensor, places: dict[str, Any]
) -> list[torch.Tensor]:
    """dq, dk and dv, put where NaN was."""
    options = config.options()
    left, right = options.pop("window_size")  # type: ignore[misc]
    given = {**options, "window_size_left": left, "window_size_right": right, **places}
    out, lse, *_ = interface._flash_attn_fwd(*tensors, return_lse=True, **given)
    grads = dict(zip(("dq", "dk", "dv"), (torch.full_like(t, math.nan) for t in tensors), strict=True))
    return list(interface._flash_attn_bwd(*tensors, out, dout, lse, deterministic=True, **given, **grads))


@configs
@pytest.mark.parametrize("tail", [0, 1, TAIL, 5000])
def test_gradients_of_rows_behind_the_last_sequence_are_zero(config: Config, tail: int) -> None:
    sequences = [neighbour(config, 300), own(config)]
    rows = {name: torch.cat([getattr(s, name) for s in sequences]) for name in ("q", "k", "v", "dout")}
    longer = {name: torch.cat([t, t.new_full((tail, *t.shape[1:]), 7.0)]) for name, t in rows.items()}
    _, places = _packed(sequences)
    found, expected = (
        poisoned_gradients(config, [of["q"], of["k"], of["v"]], of["dout"], places) for of in (longer, rows)
    )
    for name, one, other in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert_same_bits(one[: len(other)], other, name)
        assert not one[len(other) :].any(), f"{name} behind the last sequence"


@configs
def test_gradients_of_tokens_that_are_not_used_are_zero(config: Config) -> None:
    """Of a batch whose sequences use some of their keys, and of their queries."""
    mine = own(config)
    q, k, v, dout = (torch.stack([getattr(mine, name)] * 3) for name in ("q", "k", "v", "dout"))
    used = [LENGTH, LENGTH - TAIL, 1]
    for name, gradients in (("seqused_k", {1: "dk", 2: "dv"}), ("seqused_q", {0: "dq"})):
        found = poisoned_gradients(config, [q, k, v], dout, {name: _int32(used)})
        for place, what in gradients.items():
            for sequence, count in enumerate(used):
                assert not found[place][sequence, count:].any(), f"{what} of sequence {sequence}"
                assert not found[place][sequence].isnan().any(), f"{what} of sequence {sequence}"

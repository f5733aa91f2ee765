"""Decoding in kernels whose warps share up to 16 rows: the bits of those that give each warp rows of its own."""

from __future__ import annotations

import pytest
import torch
from conftest import DIM, MACHINE, Machine, built, problems
from flash_attn import deterministic_mode, flash_attn_with_kvcache
from harness import Config, Draw, assert_accurate, cache, dense, route
from hypothesis import given
from hypothesis import strategies as st
from layouts import beside

BLOCK = 128 if DIM <= 128 else 64
ROWS = 16
pytestmark = pytest.mark.narrow


@st.composite
def configs(draw: st.DrawFn) -> Config:
    causal = draw(st.booleans())
    windows = st.sampled_from([(-1, -1), (-1, -1), (40, 0), (300, 20), (-1, 30), (200, -1)])
    heads, heads_k = draw(st.sampled_from([(1, 1), (2, 1), (8, 2)]))
    return built(
        causal=causal,
        window=(-1, -1) if causal else draw(windows),
        heads=heads,
        heads_k=heads_k,
        head_dim=draw(st.sampled_from([DIM, DIM, DIM - 24])),
        softcap=draw(st.sampled_from([0.0, 0.0, 15.0])),
        sink=draw(st.sampled_from([None, None, "fp32"])),
    )


@problems(30)
@given(
    configs(),
    st.integers(1, ROWS),
    st.integers(1, 900),
    st.sampled_from([BLOCK, 2 * BLOCK, 4 * BLOCK]),
    st.integers(0, 2**31),
    st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, 700)), max_size=3),
    st.data(),
)
def test_rows_have_the_bits_of_tiles_of_64_rows(
    config: Config,
    len_q: int,
    len_k: int,
    split: int,
    seed: int,
    others: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    """In every layout: what walks all chunks in one thread block has such tiles."""
    config.need("split")
    found = beside(config, seed, (len_q, len_k), others, st.integers(1, 900), data)
    page = data.draw(st.sampled_from([16, 48, 128, 256]))
    with deterministic_mode(split_size=split):
        with route("in one thread block"):
            expected = dense(config, [found.own])
        MACHINE.set(order=data.draw(st.integers(0, 100)))
        with route("apart"):
            found.assert_same(expected, spare=9, page=page)
    assert_accurate(config, expected, found.own)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (40, 0)}, {}], ids=str)
def test_queries_are_turned_and_keys_appended(options: dict[str, object], interleaved: bool) -> None:
    config = built(heads=2, heads_k=2, **options)
    config.need("split")
    sequence = Draw(3).sequence(config, 5, 2 * BLOCK + 40)
    angles = torch.arange(3 * BLOCK)[:, None] / 10 ** torch.linspace(0, 3, DIM // 4)
    turned = [angles.cos().to(sequence.q.dtype), angles.sin().to(sequence.q.dtype)]
    results = []
    for where in ("in one thread block", "apart"):
        kept = [torch.zeros(1, 3 * BLOCK, 2, DIM, dtype=sequence.q.dtype) for _ in range(2)]
        for to, keys in zip(kept, (sequence.k, sequence.v), strict=True):
            to[0, : len(keys)] = keys
        filled = torch.tensor([len(sequence.k)], dtype=torch.int32)
        new = [tensor[None, :5] for tensor in (sequence.k, sequence.v)]
        with deterministic_mode(split_size=BLOCK), route(where):
            out = flash_attn_with_kvcache(
                sequence.q[None],
                *kept,
                *new,
                *turned,
                filled,
                rotary_interleaved=interleaved,
                **config.kwargs(),
            )
        results.append([out, *kept])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_sixteen_rows_have_kernels_of_their_own(machine: Machine) -> None:
    """Which one row takes as long as sixteen, and seventeen do not take."""
    config = built(heads=1, heads_k=1)
    config.need("split")
    sequence = Draw(7).sequence(config, ROWS + 1, 8 * BLOCK)
    executed = []
    for rows in (1, ROWS, ROWS + 1):
        before = machine.instructions
        with deterministic_mode(split_size=4 * BLOCK), route("apart"):
            cache(config, [sequence.rows(0, rows)], 8 * BLOCK)
        executed.append(machine.instructions - before)
    assert executed[0] < 1.05 * executed[1] < 0.9 * executed[2]


@pytest.mark.parametrize("order", [0, 1, 2])
def test_no_races_in_shared_memory(machine: Machine, order: int) -> None:
    config = built(heads=4, heads_k=1, causal=True)
    config.need("split")
    sequence = Draw(7).sequence(config, 4, 5 * BLOCK + 3)
    with deterministic_mode(split_size=2 * BLOCK):
        with route("in one thread block"):
            expected = dense(config, [sequence])
        machine.set(races=True, order=order)
        with route("apart"):
            dense(config, [sequence]).assert_same(expected, "watched")

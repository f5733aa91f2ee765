"""Decoding in kernels whose warps have roles, for up to 16 rows: the bits of those with tiles of 64 rows."""

from __future__ import annotations

import pytest
import torch
from conftest import DIM, MACHINE, SMALL, Machine, built, problems
from flash_attn import deterministic_mode, flash_attn_with_kvcache
from harness import Config, Draw, assert_accurate, cache, dense, paged, route
from hypothesis import given
from hypothesis import strategies as st
from layouts import beside
from limits import assert_that_all_new_keys_are_appended

BLOCK = 128 if DIM <= 128 else 64
ROWS = 16
WIDE = "in one thread block, in tiles of 64 rows"
CHOSEN = "as the GPU is filled"
HERE = ("apart", "in one thread block")


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
    """In every layout, whether the chunks spread or not."""
    config.need("split")
    found = beside(config, seed, (len_q, len_k), others, st.integers(1, 900), data)
    page = data.draw(st.sampled_from([16, 48, 128, 256]))
    with deterministic_mode(split_size=split):
        with route(WIDE):
            expected = dense(config, [found.own])
        # With one multiprocessor, thread blocks take several chunks each.
        MACHINE.set(order=data.draw(st.integers(0, 100)), processors=data.draw(st.sampled_from([1, 132])))
        with route(data.draw(st.sampled_from(HERE))):
            found.assert_same(expected, spare=9, page=page)
    assert_accurate(config, expected, found.own)


@problems(20)
@given(
    configs(),
    st.integers(1, ROWS),
    st.lists(st.integers(0, 700), min_size=1, max_size=2),
    st.sampled_from([0, 1, 2, 3, 7]),
    st.sampled_from([16, 48, 256]),
    st.integers(0, 2**31),
    st.tuples(st.integers(0, 100), st.sampled_from([1, 132])),
)
def test_with_the_mode_off_rows_have_the_bits_of_tiles_of_64_rows(
    config: Config,
    len_q: int,
    lengths: list[int],
    num_splits: int,
    page: int,
    seed: int,
    machine_has: tuple[int, int],
) -> None:
    """Whether there are splits for upstream's kernel to combine or not. Some have no key."""
    config.need("split")
    draw = Draw(seed)
    sequences = [draw.sequence(config, len_q, length) for length in lengths]
    # With one multiprocessor, thread blocks take several splits each.
    MACHINE.set(order=machine_has[0], processors=machine_has[1])
    found = []
    for where in (WIDE, CHOSEN):
        with route(where):
            found.append(paged(config, sequences, draw.generator, slice(None), page, num_splits))
    found[1].assert_same(found[0], "with roles")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (40, 0)}, {}], ids=str)
def test_queries_are_turned_and_keys_appended(options: dict[str, object], interleaved: bool) -> None:
    config = built(heads=2, heads_k=2, **options)
    config.need("split")
    sequence = Draw(3).sequence(config, 5, 2 * BLOCK + 40)
    angles = torch.arange(3 * BLOCK)[:, None] / 10 ** torch.linspace(0, 3, DIM // 4)
    turned = [angles.cos().to(sequence.q.dtype), angles.sin().to(sequence.q.dtype)]
    results = []
    for where in (WIDE, *HERE):
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
    for found in results[1:]:
        for one, other in zip(results[0], found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("window", [(-1, -1), (BLOCK, 0)])
def test_thread_blocks_of_several_chunks_append_the_keys_of_all(
    machine: Machine, window: tuple[int, int]
) -> None:
    config = built(heads=8, heads_k=8, window=window)
    config.need("split")
    machine.set(processors=1)
    assert_that_all_new_keys_are_appended(config, 5, 4 * BLOCK - 5, "apart", BLOCK, page=48)


@pytest.mark.parametrize("where", HERE)
@pytest.mark.parametrize(("rows", "has_kernels"), [(1, True), (ROWS, True), (ROWS + 1, False)])
def test_up_to_sixteen_rows_have_kernels_of_their_own(
    machine: Machine, where: str, rows: int, has_kernels: bool
) -> None:
    config = built(heads=1, heads_k=1)
    config.need("split")
    sequence = Draw(7).sequence(config, rows, 3 * BLOCK)
    executed = []
    for name in (where, f"{where}, in tiles of 64 rows"):
        before = machine.instructions
        with deterministic_mode(split_size=2 * BLOCK), route(name):
            cache(config, [sequence], 3 * BLOCK)
        executed.append(machine.instructions - before)
    assert (executed[0] != executed[1]) == (has_kernels and (DIM <= 64 or not SMALL))


@pytest.mark.parametrize(
    ("page", "rows", "has_kernels"), [(16, 1, True), (256, ROWS, True), (16, ROWS + 1, False)]
)
def test_calls_on_pages_have_them_with_the_mode_off(
    machine: Machine, page: int, rows: int, has_kernels: bool
) -> None:
    config = built(heads=1, heads_k=1)
    config.need("split")
    draw = Draw(7)
    sequence = draw.sequence(config, rows, 3 * BLOCK)
    executed = []
    for where in (CHOSEN, WIDE):
        before = machine.instructions
        with route(where):
            paged(config, [sequence], draw.generator, page=page)
        executed.append(machine.instructions - before)
    assert (executed[0] != executed[1]) == (has_kernels and DIM <= 64)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("where", HERE)
def test_no_races_in_shared_memory(machine: Machine, where: str, order: int) -> None:
    config = built(heads=4, heads_k=1, causal=True)
    config.need("split")
    sequence = Draw(7).sequence(config, 4, 5 * BLOCK + 3)
    with deterministic_mode(split_size=2 * BLOCK):
        with route(WIDE):
            expected = dense(config, [sequence])
        machine.set(races=True, order=order)
        with route(where):
            dense(config, [sequence]).assert_same(expected, "watched")


@pytest.mark.parametrize("order", [0, 1, 2])
def test_no_races_between_the_chunks_of_a_thread_block(machine: Machine, order: int) -> None:
    """With one multiprocessor a thread block takes all chunks of its rows; a warp may be done with one before others."""
    config = built(heads=8, heads_k=8)
    config.need("split")
    sequence = Draw(8).sequence(config, 9, 3 * BLOCK)
    with deterministic_mode(split_size=BLOCK):
        with route(WIDE):
            expected = dense(config, [sequence])
        machine.set(processors=1, races=True, order=order)
        with route("apart"):
            dense(config, [sequence]).assert_same(expected, "watched")

"""Heads of a group whose rows share tiles, where a call has a few queries (fork_group.h): the bits of heads that do not.

What a row is held against cannot share tiles: each head with keys of its own, or with tiles of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from conftest import DIM, MACHINE, Machine, built, problems
from flash_attn import deterministic_mode
from harness import (
    Config,
    Draw,
    Rows,
    Sequence,
    assert_accurate,
    cache,
    dense,
    joined,
    route,
    varlen,
)
from hypothesis import given
from hypothesis import strategies as st
from layouts import beside
from limits import assert_that_all_new_keys_are_appended, scratch

BLOCK = 128 if DIM <= 128 else 64
QUERIES = [2, 3, 5, 8, 16]
OWN_TILES = "apart, each head in its own tiles"


@st.composite
def configs(draw: st.DrawFn) -> Config:
    group, heads_k = draw(st.sampled_from([(2, 2), (4, 1), (7, 1), (8, 1), (7, 2)]))
    causal = draw(st.booleans())
    windows = [(-1, -1), (40, 0), (300, 0), (200, 1), (-1, 2)]
    return built(
        head_dim=draw(st.sampled_from([DIM, DIM, DIM - 8])),
        heads=group * heads_k,
        heads_k=heads_k,
        causal=causal,
        window=(-1, -1) if causal else draw(st.sampled_from(windows)),
        softcap=draw(st.sampled_from([0.0, 0.0, 15.0])),
        sink=draw(st.sampled_from(["", "fp32"])),
    )


def ungrouped(config: Config, sequence: Sequence) -> tuple[Config, Sequence]:
    """The same rows where each head has keys of its own."""
    k, v = (t.repeat_interleave(config.heads // config.heads_k, 1) for t in (sequence.k, sequence.v))
    return replace(config, heads_k=config.heads), replace(sequence, k=k, v=v)


queries = st.sampled_from([1, *QUERIES])
lengths_k = st.one_of(st.integers(1, 700), st.sampled_from([BLOCK + 1, 2 * BLOCK, 4 * BLOCK + 3]))


@problems(20)
@given(
    configs(),
    queries,
    lengths_k,
    st.sampled_from([BLOCK, 2 * BLOCK]),
    st.integers(0, 2**31),
    st.lists(st.tuples(st.sampled_from([0, 1, *QUERIES]), st.integers(0, 700)), max_size=3),
    st.data(),
)
def test_rows_are_those_of_heads_with_keys_of_their_own(
    config: Config,
    len_q: int,
    len_k: int,
    split: int,
    seed: int,
    others: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    """In every layout, beside sequences of other lengths: fewer queries, more, or none."""
    config.need("split")
    found = beside(config, seed, (len_q, len_k), others, lengths_k, data)
    page = data.draw(st.sampled_from([16, 48, 128, 256]))
    with deterministic_mode(split_size=split):
        alone_config, alone = ungrouped(config, found.own)
        expected = dense(alone_config, [alone])
        MACHINE.set(processors=data.draw(st.sampled_from([1, 132])), order=data.draw(st.integers(0, 100)))
        dense(config, [found.own]).assert_same(expected, "dense")
        found.assert_same(expected, spare=9, page=page)
    assert_accurate(config, expected, found.own)


@pytest.mark.parametrize("len_q", QUERIES)
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 4, "heads_k": 2, "causal": True},
        {"heads": 4, "heads_k": 1, "window": (BLOCK + 9, 0)},
        {"heads": 7, "heads_k": 1, "causal": True, "sink": "fp32"},
        {"heads": 8, "heads_k": 1, "causal": True, "softcap": 15.0},
    ],
    ids=str,
)
def test_tokens_at_once_have_the_bits_of_one_by_one(options: dict[str, object], len_q: int) -> None:
    config = built(**options)
    config.need("split")
    sequence = Draw(len_q).sequence(config, len_q, 3 * BLOCK + 2)  # the first queries see a chunk less
    with deterministic_mode(split_size=BLOCK):
        at_once = cache(config, [sequence], 4 * BLOCK)
        with route(OWN_TILES):
            parts = [cache(config, [sequence.rows(n, n + 1)], 4 * BLOCK) for n in range(len_q)]
    at_once.assert_same(joined(parts), f"{len_q} tokens")


@pytest.mark.parametrize("page", [0, 16, 256])
@pytest.mark.parametrize("window", [None, (16, 0), (BLOCK + 1, 0)])
@pytest.mark.parametrize("group", [2, 7])
def test_new_keys_are_appended(group: int, window: tuple[int, int] | None, page: int) -> None:
    config = built(heads=2 * group, heads_k=2, causal=window is None, window=window or (-1, -1))
    config.need("split")
    for before in (0, 2 * BLOCK - 3):
        for new in (5, BLOCK + 1):
            assert_that_all_new_keys_are_appended(config, before, new, "apart", BLOCK, 5, page=page)


@pytest.mark.parametrize("budget", [1, 70 * 4 * (DIM + 2) * 4])
@pytest.mark.parametrize("group", [4, 7])
def test_slices_have_the_bits(group: int, budget: int) -> None:
    """Of blocks of rows, of one head of keys, and of a sequence."""
    config = built(heads=2 * group, heads_k=2, causal=True, sink="fp32")
    config.need("split")
    draw = Draw(budget)
    sequences = [draw.sequence(config, len_q, 3 * BLOCK + len_q) for len_q in (16, 0, 3, 11)]
    with deterministic_mode(split_size=BLOCK), route("apart"):
        for which in (0, 2, 3):
            whole = varlen(config, sequences, which)
            with scratch(budget):
                varlen(config, sequences, which).assert_same(whole, f"in slices of {budget} bytes")


@pytest.mark.parametrize("causal", [False, True])
def test_rows_past_the_number_of_queries_that_a_call_names_are_nan(causal: bool) -> None:
    config = built(heads=8, heads_k=2, causal=causal)
    config.need("split")
    draw = Draw(3)
    sequences = [draw.sequence(config, len_q, 2 * BLOCK + 9) for len_q in (5, 2)]
    with deterministic_mode(split_size=BLOCK):
        full, short = ([varlen(config, sequences, i, slack_q=slack) for i in (0, 1)] for slack in (0, -3))
    short[1].assert_same(full[1], "the sequence that is as long as the call says")
    Rows(short[0].out[:2], short[0].lse[:, :2]).assert_same(
        Rows(full[0].out[:2], full[0].lse[:, :2]), "the queries that the call names"
    )
    assert short[0].out[2:].isnan().all()
    assert short[0].lse[:, 2:].isnan().all()


def instructions(machine: Machine, config: Config, where: str, len_q: int, processors: int = 132) -> int:
    sequence = Draw(1).sequence(config, len_q, 16 * BLOCK)
    machine.set(processors=processors)
    before = machine.instructions
    with deterministic_mode(split_size=4 * BLOCK), route(where):
        dense(config, [sequence])
    return machine.instructions - before


FILLED = "as the GPU is filled"


@pytest.mark.parametrize("processors", [1, 132])  # filled by these rows, or not
@pytest.mark.parametrize(("len_q", "group"), [(2, 4), (4, 4)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sink": "fp32"}, {"softcap": 15.0}], ids=str)
def test_keys_are_multiplied_once_for_a_group(
    machine: Machine, options: dict[str, object], len_q: int, group: int, processors: int
) -> None:
    """By kernels for up to 16 rows, with the group's heads and without."""
    config = built(heads=group, heads_k=1, **options)
    config.need("split")
    shared, own = (instructions(machine, config, where, len_q, processors) for where in (FILLED, OWN_TILES))
    assert shared < 2 * own / group


@pytest.mark.parametrize(
    ("options", "len_q", "processors"),
    [
        ({"alibi": True}, 4, 132),
        ({"mask": True}, 4, 132),
        ({"bias": "fp32"}, 4, 132),
        ({}, 17, 132),
        ({"window": (40, 0)}, 4, 1),  # the GPU is filled: thread blocks walk the few chunks of their rows
    ],
    ids=str,
)
def test_other_calls_have_tiles_for_each_head(
    machine: Machine, options: dict[str, object], len_q: int, processors: int
) -> None:
    config = built(heads=4, heads_k=1, **options)
    config.need("split")
    where = FILLED if processors == 1 else "apart"
    alone = "in one thread block" if processors == 1 else OWN_TILES
    found, own = (instructions(machine, config, path, len_q, processors) for path in (where, alone))
    assert found == own


def test_a_window_s_single_queries_share_tiles_too(machine: Machine) -> None:
    """Their heads are not the rows of one head without it."""
    config = built(heads=4, heads_k=1, window=(3 * BLOCK, 0))
    config.need("split")
    shared, own = (instructions(machine, config, where, 1) for where in ("apart", OWN_TILES))
    assert shared < 2 * own / 4


def test_every_number_of_queries_and_heads() -> None:
    """Where tiles end within a query, and where they do not."""
    draw = Draw(5)
    for len_q, group in itertools.product((1, 4, 9, 16), (2, 5, 8, 13)):
        config = built(heads=group, heads_k=1, causal=True)
        config.need("split")
        sequence = draw.sequence(config, len_q, BLOCK + 5)
        with deterministic_mode(split_size=BLOCK):
            with route("in one thread block"):
                expected = dense(config, [sequence])
            with route("apart"):
                dense(config, [sequence]).assert_same(expected, f"{len_q} queries of {group} heads")

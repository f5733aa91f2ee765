"""Lengths that a call names, up to 2**31 - 1; none at all; and the rows past those that there are."""

from __future__ import annotations

import math
from typing import Any

import flash_attn_2_cuda
import pytest
import torch
from conftest import DIM, HALF, MACHINE, Machine, built, problems
from flash_attn import deterministic_mode, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from harness import ROUTES, Config, Draw, assert_accurate, cu_seqlens, in_pages, route, varlen
from hypothesis import given
from hypothesis import strategies as st
from limits import (
    MOST_TOKENS,
    MOST_TOKENS_OF_WINDOW,
    assert_that_a_cache_ends_where_it_ends,
    assert_that_rows_of_no_sequence_are_zeros,
    scratch,
)
from test_rows import BLOCK, configs

MOST = 2**31 - 1
named = st.one_of(st.integers(1, MOST), st.sampled_from([2**24, 2**30, MOST - 1023, MOST - 128, MOST]))


@problems(40)
@given(configs(), st.integers(1, 140), st.integers(1, 300), named, named, st.booleans(), st.integers(0, 99))
def test_longer_lengths_than_there_are_change_nothing(
    config: Config, len_q: int, len_k: int, named_q: int, named_k: int, mode: bool, seed: int
) -> None:
    """Nor do they take more scratch. A mask and a bias are as wide as the call says, and are left out."""
    config = built(**{**vars(config), "mask": False, "bias": ""})
    config.need("fwd", "split")
    draw = Draw(seed)
    sequences = [draw.sequence(config, len_q, len_k), draw.sequence(config, 3, 90)]
    longest, all_tokens = (max(len_q, 3), max(len_k, 90)), (len_q + 3, len_k + 90)
    results, taken = [], []
    for names in (longest, all_tokens, (named_q, named_k)):
        slack_q, slack = (max(0, name - least) for name, least in zip(names, longest, strict=True))
        MACHINE.watch_memory()
        with deterministic_mode(mode, split_size=BLOCK):
            results.append(varlen(config, sequences, slack=slack, slack_q=slack_q))
        taken.append(MACHINE.largest_allocation)
    for got in results[1:] if mode else ():
        got.assert_same(results[0], f"named as {named_q} and {named_k}")
    assert_accurate(config, results[2], sequences[0])
    assert taken[2] <= max(taken[:2])


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("window", [(-1, -1), (4, -1), (-1, 9)])
def test_a_table_may_have_pages_for_more_keys_than_there_can_be(mode: bool, window: tuple[int, int]) -> None:
    config = built(heads=2, heads_k=1, window=window)
    config.need("split")
    draw = Draw(3)
    sequences = [draw.sequence(config, 20, length) for length in (300, 90)]
    k, v, table = in_pages(sequences, draw.generator, 2048)
    wide = torch.zeros(2, 2**20 + 1, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    q, lengths = torch.stack([s.q for s in sequences]), torch.tensor([300, 90], dtype=torch.int32)
    options = {**config.kwargs(), "return_softmax_lse": True, "cache_seqlens": lengths}
    with deterministic_mode(mode, split_size=2**30):
        short, long = (
            flash_attn_with_kvcache(q, k, v, block_table=one, **options, num_splits=3)
            for one in (table, wide)
        )
        packed = (q.flatten(0, 1), k, v, cu_seqlens((20, 20)), cu_seqlens((300, 90)), 20, MOST)
        out = flash_attn_varlen_func(*packed, block_table=wide, **config.kwargs())
    for one, other in zip(short, long, strict=True):
        assert torch.equal(one, other) if mode else torch.allclose(one, other, atol=2e-3)
    assert torch.allclose(out, short[0].flatten(0, 1), atol=2e-3)


@pytest.mark.parametrize(
    ("tokens", "window", "said"),
    [
        (MOST_TOKENS + 1, (-1, -1), f"k has {MOST_TOKENS + 1} tokens; kernels count up to {MOST_TOKENS}"),
        (
            MOST_TOKENS_OF_WINDOW + 1,
            (9, 0),
            f"k has {MOST_TOKENS_OF_WINDOW + 1} tokens of a sequence; with window_size kernels count up to",
        ),
    ],
)
def test_more_tokens_than_kernels_count_are_refused(tokens: int, window: tuple[int, int], said: str) -> None:
    q, keys = torch.zeros(1, 2, 1, DIM, dtype=HALF), torch.zeros(DIM, dtype=HALF).expand(1, tokens, 1, DIM)
    for call in (flash_attn_func, flash_attn_with_kvcache):
        with pytest.raises(ValueError, match=said.replace("k has", "k(_cache)? has")):
            call(q, keys, keys, window_size=window)


def test_a_length_of_more_than_32_bits_is_named() -> None:
    q, starts = torch.zeros(4, 1, DIM, dtype=HALF), cu_seqlens([4])
    with pytest.raises(ValueError, match=r"max_seqlen_k=2147483648 is no length"):
        flash_attn_varlen_func(q, q, q, starts, starts, 4, 2**31)


@pytest.mark.parametrize("budget", [1, 3 * 40 * DIM * 4])
def test_scratch_has_a_cap_where_the_chunks_of_one_block_of_rows_take_more(
    machine: Machine, budget: int
) -> None:
    """Then a slice has some of the chunks, and leaves each row's running result to the next."""
    config = built(heads=1, heads_k=1, sink="fp32")
    config.need("split")
    sequences = [Draw(5).sequence(config, 40, 7 * BLOCK + 9)]
    results = []
    for own in (0, budget):
        before = machine.launches
        machine.watch_memory()
        with deterministic_mode(split_size=BLOCK), route("apart"), scratch(own):
            results.append(varlen(config, sequences))
        slices = (machine.launches - before) // 2
        assert slices == (1 if own == 0 else 8 if own == 1 else 3)
    results[1].assert_same(results[0], "in slices")
    rows = 4 * 40 * 8 * BLOCK * DIM  # what torch allocates is no less than k
    assert machine.largest_allocation <= max(rows, budget + 2 * 40 * (DIM + 2) * 4 + 1024)


# Rows of no sequence -------------------------------------------------------------------------------------


@problems(40)
@given(
    configs(),
    st.lists(st.tuples(st.sampled_from([0, 1, 5, 64, 130]), st.integers(0, 300)), min_size=1, max_size=3),
    st.integers(1, 150),
    st.sampled_from([0, 0, 3, 200]),
    st.sampled_from([*ROUTES, ""]),
    st.integers(0, 99),
)
def test_rows_of_no_sequence_are_zeros(
    config: Config, lengths: list[tuple[int, int]], past: int, slack: int, where: str, seed: int
) -> None:
    """A route: with the mode on."""
    config.need("fwd", "split")
    draw = Draw(seed)
    sequences = [draw.sequence(config, *each) for each in lengths]
    with deterministic_mode(bool(where), split_size=BLOCK), route(where or "as the GPU is filled"):
        assert_that_rows_of_no_sequence_are_zeros(config, sequences, past, slack)


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_rows_of_no_sequence_are_zeros_in_pages(mode: bool) -> None:
    config = built(heads=2, heads_k=2)
    config.need("split")
    for queries in (3, 20):
        sequences = [Draw(7).sequence(config, queries, 3 * BLOCK)] * 2
        with deterministic_mode(mode, split_size=BLOCK):
            assert_that_rows_of_no_sequence_are_zeros(config, sequences, 90, 0, page=128)


# Caches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("leftpad", [0, 37])
@pytest.mark.parametrize(("capacity", "length"), [(300, 301), (300, 380), (96, 97), (96, 1000)])
def test_a_cache_ends_where_it_ends(capacity: int, length: int, leftpad: int, causal: bool) -> None:
    """In either mode; the rows that would need keys behind its end are NaN."""
    config = built(heads=2, heads_k=1, causal=causal)
    config.need("fwd", "split")
    given = {"leftpad": leftpad}
    for where in ROUTES:
        assert_that_a_cache_ends_where_it_ends(config, capacity, length, where, mode=True, **given)
    for splits in (0, 3):
        options = {**given, "num_splits": splits}
        assert_that_a_cache_ends_where_it_ends(config, capacity, length, "", mode=False, **options)
    if not leftpad and capacity % 16 == 0:
        for splits in (0, 3):
            options = {"num_splits": splits, "page": 16}
            assert_that_a_cache_ends_where_it_ends(config, capacity, length, "", mode=False, **options)


def caches(rows: int, length: int, page: int = 0) -> list[torch.Tensor]:
    draw = Draw(rows)
    config = built(heads=2, heads_k=2)
    keys = [draw.sequence(config, 1, length) for _ in range(rows)]
    found = [torch.stack([getattr(s, name) for s in keys]) for name in "kv"]
    return [t.view(-1, page, 2, DIM) if page else t for t in found]


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("kind", ["pages", "index", "more rows than q"])
def test_one_length_is_every_sequence_s(kind: str, mode: bool) -> None:
    built().need("fwd", "split")
    k, v = caches(5, 256, 64 if kind == "pages" else 0)
    q = Draw(1).sequence(built(heads=2, heads_k=2), 6, 1).q.view(3, 2, 2, DIM)
    options: dict[str, Any] = {}
    if kind == "pages":
        options["block_table"] = torch.arange(12, dtype=torch.int32).view(3, 4)
    if kind == "index":
        options["cache_batch_idx"] = torch.tensor([4, 0, 3], dtype=torch.int32)
    each = torch.full((3,), 77, dtype=torch.int32)
    with deterministic_mode(mode, split_size=BLOCK):
        one, other = (flash_attn_with_kvcache(q, k, v, cache_seqlens=n, **options) for n in (77, each))
    assert torch.equal(one, other)


def test_a_key_is_appended_to_a_cache_that_is_smaller_than_the_group() -> None:
    config = built(heads=8, heads_k=1)
    config.need("split")
    sequence = Draw(4).sequence(config, 1, 2)
    held = [torch.zeros(1, 3, 1, DIM, dtype=HALF) for _ in range(2)]
    for cache, keys in zip(held, (sequence.k, sequence.v), strict=True):
        cache[0, 0] = keys[0]
    out = flash_attn_with_kvcache(
        sequence.q[None], *held, sequence.k[None, 1:], sequence.v[None, 1:], cache_seqlens=1
    )
    assert torch.equal(held[0][0, :2], sequence.k)
    assert torch.allclose(
        out[0], flash_attn_func(sequence.q[None], sequence.k[None], sequence.v[None])[0], atol=2e-3
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"v": (1, 1, 2, DIM)}, "v is given without k"),
        ({"k": (1, 1, 2, DIM)}, "k is given without v"),
        ({"rotary_sin": (64, 8)}, "rotary_sin is given without k, the keys"),
        (
            {"k": (1, 1, 2, DIM), "v": (1, 1, 2, DIM), "rotary_sin": (64, 8)},
            "rotary_sin is given without rotary_cos",
        ),
    ],
)
def test_half_of_a_pair_is_refused(given: dict[str, tuple[int, ...]], said: str) -> None:
    q, (k, v) = torch.zeros(1, 1, 2, DIM, dtype=HALF), caches(1, 64)
    tensors = {name: torch.zeros(shape, dtype=HALF) for name, shape in given.items()}
    with pytest.raises(RuntimeError, match=said):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=9, **tensors)


# Nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0), (2, 0, 0)]
)
def test_nothing_gives_nothing(batch: int, queries: int, keys: int, mode: bool, dropout: float) -> None:
    """No sequence, no query, no key: empty results and zeros, and gradients of zeros."""
    heads = (4, 2, 2)
    built().need("fwd", "split")
    gradients = not built().lacks("bwd")
    lengths = (queries, keys, keys)
    for packed in (False, True):
        shapes = [(batch, n, h, DIM) for n, h in zip(lengths, heads, strict=True)]
        inputs = [torch.ones(*shape, dtype=HALF) for shape in shapes]
        if packed:
            inputs = [t.flatten(0, 1) for t in inputs]
        inputs = [t.requires_grad_(gradients) for t in inputs]
        starts = [cu_seqlens([n] * batch) for n in (queries, keys)]
        with deterministic_mode(mode, split_size=BLOCK):
            if packed:
                out = flash_attn_varlen_func(*inputs, *starts, queries, keys, dropout)
            else:
                out = flash_attn_func(*inputs, dropout)
            assert out.shape == inputs[0].shape
            assert not out.any()
            if gradients:
                for gradient in torch.autograd.grad(out, inputs, torch.ones_like(out)):
                    assert not gradient.any()


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_a_cache_without_sequences_queries_or_room(mode: bool) -> None:
    built().need("fwd", "split")
    with deterministic_mode(mode, split_size=BLOCK):
        for batch, queries, room in ((0, 1, 64), (1, 0, 64), (1, 2, 0)):
            q = torch.ones(batch, queries, 2, DIM, dtype=HALF)
            k, v = (torch.ones(batch, room, 2, DIM, dtype=HALF) for _ in range(2))
            out, lse = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
            assert out.shape == q.shape
            assert not out.any()
            assert (lse == math.inf).all()
        q, k = torch.ones(1, 0, 2, DIM, dtype=HALF), torch.ones(1, 1, 2, DIM, dtype=HALF)
        held = caches(1, 64)
        with pytest.raises(ValueError, match="q has no queries, so nothing appends k"):
            flash_attn_with_kvcache(q, *held, k, k, cache_seqlens=3)


def test_no_sequence_leaves_rows_of_none() -> None:
    q, starts = torch.ones(5, 2, DIM, dtype=HALF), cu_seqlens([])
    built().need("fwd", "split")
    for longest in (0, 7):
        out, lse, _ = flash_attn_varlen_func(q, q, q, starts, starts, longest, 7, return_attn_probs=True)
        assert not out.any()
        assert not lse.any()


def test_cu_seqlens_without_a_number_is_refused() -> None:
    q, none = torch.ones(5, 2, DIM, dtype=HALF), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q is empty"):
        flash_attn_varlen_func(q, q, q, none, none, 5, 5)


def test_zero_tensors_says_what_rows_of_no_sequence_hold() -> None:
    config = built(heads=2, heads_k=2)
    config.need("fwd", "split")
    sequence = Draw(2).sequence(config, 9, 40)
    q = torch.cat([sequence.q, sequence.q])
    options = (9, 40, 0.0, DIM**-0.5, True, False, -1, -1, 0.0, False, None)
    for mode in (True, False):
        with deterministic_mode(mode, split_size=BLOCK):
            out, lse, *_ = flash_attn_2_cuda.varlen_fwd(
                q, sequence.k, sequence.v, None, cu_seqlens([9]), cu_seqlens([40]), None, None, None, None,
                *options,
            )  # fmt: skip
            assert not out[9:].any()
            assert (lse[:, 9:] == -math.inf).all()

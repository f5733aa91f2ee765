"""The row contract for shapes that nobody chose: hypothesis draws the problem, what it is called with, and the machine.

Emulated: see ``scripts/lab/emulator.py`` for what that shows. tests/wheel has the same rules for fixed shapes on a GPU.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace

import flash_attn_2_cuda
import pytest
import torch
from conftest import DIM, HALF, HALF_NAME, MACHINE, SMALL, Machine, built, problems
from flash_attn import deterministic_mode, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from gradients import begun_at
from harness import (
    ROUTES,
    Config,
    Draw,
    Rows,
    assert_accurate,
    cache,
    cu_seqlens,
    dense,
    extras,
    joined,
    paged,
    route,
    varlen,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from layouts import beside
from limits import (
    assert_that_a_cache_ends_where_it_ends,
    assert_that_a_cache_s_tokens_may_lie_far_apart,
    assert_that_all_new_keys_are_appended,
    assert_that_rotary_tables_end_where_they_end,
    scratch,
)
from rotary import Appending

BLOCK = 128 if DIM <= 128 else 64


@st.composite
def configs(draw: st.DrawFn) -> Config:
    causal = draw(st.booleans())
    window = (
        (-1, -1)
        if causal
        else draw(st.sampled_from([(-1, -1), (-1, -1), (40, 0), (300, 20), (-1, 30), (200, -1)]))
    )
    heads, heads_k = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (4, 1)]))
    alibi = draw(st.sampled_from([False, False, True]))
    return built(
        head_dim=draw(st.sampled_from([DIM, DIM, DIM - 8])),
        heads=heads,
        heads_k=heads_k,
        causal=causal,
        window=window,
        softcap=draw(st.sampled_from([0.0, 0.0, 15.0])),
        alibi=alibi,
        mask=draw(st.sampled_from([False, False, True])),
        bias=draw(st.sampled_from(["", "", HALF_NAME, "fp32"])),
        sink=""
        if alibi and (causal or window[1] == 0)
        else draw(st.sampled_from(["", "", HALF_NAME, "fp32"])),
    )


def causal_form(config: Config) -> Config:
    """The call as a causal one; without its sink where such a call takes none."""
    sink = "" if config.alibi else config.sink
    return replace(config, causal=True, window=(-1, -1), sink=sink)


lengths_q = st.one_of(st.just(1), st.integers(1, 140))
lengths_k = st.one_of(st.integers(1, 700), st.sampled_from([1, 255, 256, 257, 511, 512, 513]))
splits = st.sampled_from([BLOCK, 2 * BLOCK])
seeds = st.integers(0, 2**31)
machines = st.tuples(st.sampled_from([1, 16, 132]), st.integers(0, 100))


def on(machine: tuple[int, int]) -> None:
    MACHINE.set(*machine)


@problems(15)
@given(configs(), lengths_q, lengths_k, splits, seeds, machines, st.integers(1, 3), st.data())
def test_a_row_is_the_same_alone_and_in_a_batch(
    config: Config,
    len_q: int,
    len_k: int,
    split: int,
    seed: int,
    machine: tuple[int, int],
    batch: int,
    data: st.DataObject,
) -> None:
    config.need("split")
    draw = Draw(seed)
    sequences = [draw.sequence(config, len_q, len_k) for _ in range(batch)]
    which = data.draw(st.integers(0, batch - 1))
    with deterministic_mode(split_size=split):
        alone = dense(config, [sequences[which]])
        on(machine)
        dense(config, sequences, which).assert_same(alone, "in a batch")
    assert_accurate(config, alone, sequences[which])


@problems(15)
@given(
    configs(),
    lengths_q,
    lengths_k,
    splits,
    seeds,
    machines,
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 700)), max_size=3),
    st.data(),
)
def test_a_row_is_the_same_in_every_layout(
    config: Config,
    len_q: int,
    len_k: int,
    split: int,
    seed: int,
    machine: tuple[int, int],
    others: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    config.need("split")
    found = beside(config, seed, (len_q, len_k), others, lengths_k, data)
    spare = data.draw(st.integers(0, 600))
    slack = data.draw(st.sampled_from([0, 0, 900]))
    page = data.draw(st.sampled_from([16, 32, 48, 64, 128, 144, 256]))
    with deterministic_mode(split_size=split):
        alone = dense(config, [found.own])
        on(machine)
        found.assert_same(alone, spare, page, slack)


@problems(15)
@given(configs(), st.integers(2, 140), lengths_k, splits, seeds, st.lists(st.integers(1, 139), max_size=3))
def test_a_row_is_the_same_in_pieces(
    config: Config, len_q: int, more: int, split: int, seed: int, cuts: list[int]
) -> None:
    """Chunked prefill, and the last row alone, as in decode. Only where rows do not look ahead."""
    config.need("split")
    if not config.causal and config.window[1] != 0:
        config = causal_form(config)
    config.need("split")
    sequence = Draw(seed).sequence(config, len_q, len_q + more)
    edges = sorted({0, len_q, len_q - 1, *(c for c in cuts if c < len_q)})
    with deterministic_mode(split_size=split):
        whole = dense(config, [sequence])
        parts = [dense(config, [sequence.rows(a, b)]) for a, b in itertools.pairwise(edges)]
    joined(parts).assert_same(whole, f"cut at {edges}")


@problems(15)
@given(configs(), lengths_q, st.integers(1, 500), splits, seeds)
def test_appended_keys_give_the_rows_of_a_dense_call(
    config: Config, len_q: int, before: int, split: int, seed: int
) -> None:
    config = causal_form(config)
    config.need("split")
    sequence = Draw(seed).sequence(config, len_q, before + len_q)
    buffers = [
        torch.full((1, before + len_q + 50, config.heads_k, config.head_dim), math.nan, dtype=HALF)
        for _ in range(2)
    ]
    for buffer, known in zip(buffers, (sequence.k, sequence.v), strict=True):
        buffer[0, :before] = known[:before]
    with deterministic_mode(split_size=split):
        expected = dense(config, [sequence])
        new = (t[None, before:].contiguous() for t in (sequence.k, sequence.v))
        length = torch.tensor([before], dtype=torch.int32)
        own = extras([sequence], buffers[0].shape[1])
        out, lse = flash_attn_with_kvcache(
            sequence.q[None],
            *buffers,
            *new,
            cache_seqlens=length,
            return_softmax_lse=True,
            **config.kwargs(),
            **own,
        )
    Rows(out[0], lse[0]).assert_same(expected, "appended")
    for buffer, known in zip(buffers, (sequence.k, sequence.v), strict=True):
        assert torch.equal(buffer[0, : before + len_q], known)


@problems(15)
@given(
    configs(),
    st.integers(1, 9),
    st.lists(st.integers(1, 400), min_size=1, max_size=3),
    splits,
    seeds,
    machines,
    st.booleans(),
    st.integers(0, 300),
    st.sampled_from([0, 1]),
)
def test_rotary_rows_are_the_same_in_a_batch_and_one_by_one(
    config: Config,
    new: int,
    before: list[int],
    split: int,
    seed: int,
    machine: tuple[int, int],
    interleaved: bool,
    slack: int,
    first: int,
) -> None:
    """New keys and queries are rotated by their position and appended: all at once, among strangers, and token by token."""
    config = replace(causal_form(config), head_dim=DIM, mask=False, bias="")
    config.need("split")
    draw = Draw(seed)
    sequences = [draw.sequence(config, new, length + new) for length in before]
    appending = Appending(config, sequences, new, max(before) + new + slack, interleaved)
    with deterministic_mode(split_size=split):
        among_strangers = appending.at_once()
        on(machine)
        replace(appending, first=first).alone().one_by_one().assert_same(among_strangers, "token by token")
    assert_accurate(config, among_strangers, appending.turned())


@problems(15)
@given(configs(), lengths_q, lengths_k, seeds, machines)
def test_stock_is_accurate_with_the_mode_off(
    config: Config, len_q: int, len_k: int, seed: int, machine: tuple[int, int]
) -> None:
    # Upstream leaves out a right edge that is as far away as there are keys, also where more queries than keys
    # would see it.
    assume(not len_k <= config.window[1] < len_q - 1)
    config.need("fwd", "split")
    on(machine)
    sequence = Draw(seed).sequence(config, len_q, len_k)
    assert_accurate(config, dense(config, [sequence]), sequence)


def test_stock_depends_on_the_number_of_processors(machine: Machine) -> None:
    """The negative control: without the mode, the emulator shows the dependence that the mode removes."""
    config = built(heads=2, heads_k=2)
    config.need("fwd", "split")
    sequence = Draw(1).sequence(config, 64, 2048)
    machine.set(processors=1)
    one = dense(config, [sequence])
    machine.set(processors=132)
    assert not dense(config, [sequence]).same(one)


def test_hidden_garbage_and_poisoned_slots_change_nothing() -> None:
    config = built(heads=2, heads_k=2, causal=True)
    config.need("split")
    sequence = Draw(2).sequence(config, 33, 300)
    with deterministic_mode(split_size=BLOCK):
        results = [
            cache(config, [sequence], 400, poison=value) for value in (0.0, 60000.0, math.nan, math.inf)
        ]
    for result in results[1:]:
        result.assert_same(results[0], "unused slots of the cache")


@pytest.mark.parametrize("where", ["in one thread block", "apart"])
@pytest.mark.parametrize("capacity", [BLOCK, 2 * BLOCK])
def test_a_full_cache_is_not_written_past_its_end(where: str, capacity: int) -> None:
    """What does not fit is dropped, as by upstream, and the rows that would need it are NaN."""
    config = built(heads=1, heads_k=1)
    config.need("split")
    q, k = torch.randn(2, 4, 1, DIM).to(HALF), torch.randn(2, capacity, 1, DIM).to(HALF)
    before = k.clone()
    with deterministic_mode(split_size=BLOCK), route(where):
        out = flash_attn_with_kvcache(
            q,
            k,
            k.clone(),
            q,
            q,
            cache_seqlens=torch.tensor([capacity, capacity - 4], dtype=torch.int32),
            causal=True,
        )
    assert torch.equal(k[0], before[0])
    assert torch.equal(k[1, :-4], before[1, :-4])
    assert torch.equal(k[1, -4:], q[1])
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("where", ROUTES)
@pytest.mark.parametrize("filled", [300, 298])
def test_a_cache_that_ends_within_a_block_is_not_written_past_its_end(where: str, filled: int) -> None:
    """There the next sequence's cache begins."""
    config = built(heads=1, heads_k=1)
    config.need("split")
    q, k = torch.randn(2, 4, 1, DIM).to(HALF), torch.randn(2, 300, 1, DIM).to(HALF)
    before, v, room = k.clone(), k.clone(), 300 - filled
    with deterministic_mode(split_size=BLOCK), route(where):
        out, lse = flash_attn_with_kvcache(
            q,
            k,
            v,
            q,
            q,
            cache_seqlens=torch.tensor([filled, 100], dtype=torch.int32),
            causal=True,
            return_softmax_lse=True,
        )
    for cached in (k, v):
        assert torch.equal(cached[0], torch.cat([before[0, :filled], q[0, :room]]))
        assert torch.equal(cached[1], torch.cat([before[1, :100], q[1], before[1, 104:]]))
    for rows in (out[0, :, 0], lse[0, 0]):
        assert rows[:room].isfinite().all()
        assert rows[room:].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("filled", [298, 300, 100_000])
def test_no_rotation_is_read_past_the_end_of_its_table(causal: bool, filled: int) -> None:
    """Of two sequences, new keys of the first do not fit the cache, which is as long as the table."""
    config = built(heads=1, heads_k=1, causal=causal)
    config.need("split")
    q, cache = torch.randn(2, 4, 1, DIM).to(HALF), torch.randn(2, 300, 1, DIM).to(HALF)
    angles = torch.randn(300, 16)
    lengths = torch.tensor([filled, 100], dtype=torch.int32)
    with deterministic_mode(split_size=BLOCK):
        out = flash_attn_with_kvcache(
            q,
            cache,
            cache.clone(),
            q,
            q,
            angles.cos().to(HALF),
            angles.sin().to(HALF),
            lengths,
            causal=causal,
        )
    fit = max(0, 300 - filled) if causal else 0
    assert out[0, :fit].isfinite().all()
    assert out[0, fit:].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("where", ROUTES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_need_keys_past_the_length_that_a_call_names_are_nan(
    where: str, masked: bool, causal: bool
) -> None:
    config = built(heads=1, heads_k=1, causal=causal, mask=masked)
    config.need("split")
    q, k = torch.randn(70, 1, DIM).to(HALF), torch.randn(120, 1, DIM).to(HALF)
    starts = [torch.tensor([0, length], dtype=torch.int32) for length in (70, 120)]
    results = []
    with deterministic_mode(split_size=BLOCK), route(where):
        for longest in (120, 100):
            own = {"attn_mask": torch.ones(longest, dtype=torch.bool)} if masked else {}
            results.append(flash_attn_varlen_func(q, k, k, *starts, 70, longest, causal=causal, **own))
    enough = 50 if causal else 0
    assert torch.equal(results[1][:enough].view(torch.int16), results[0][:enough].view(torch.int16))
    assert results[0].isfinite().all()
    assert results[1][enough:].isnan().all()


@pytest.mark.parametrize("where", ROUTES)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_past_the_number_of_queries_that_a_call_names_are_nan(
    where: str, heads: int, causal: bool
) -> None:
    """And the others are theirs: one query of each sequence is named, and with it upstream takes causal for no difference."""
    config = built(heads=heads, heads_k=1, causal=causal)
    config.need("split")
    q, k = torch.randn(5, heads, DIM).to(HALF), torch.randn(40, 1, DIM).to(HALF)
    starts = [torch.tensor(places, dtype=torch.int32) for places in ([0, 3, 5], [0, 20, 40])]
    with deterministic_mode(split_size=BLOCK), route(where):
        full, short = (
            flash_attn_varlen_func(q, k, k, *starts, longest, 20, causal=causal) for longest in (3, 1)
        )
    assert torch.equal(short[[0, 3]].view(torch.int16), full[[0, 3]].view(torch.int16))
    assert short[[1, 2, 4]].isnan().all()


def test_one_query_a_sequence_at_most_with_grouped_heads() -> None:
    """A sequence without a query has no row that the heads of a group could be rows of."""
    config = built(heads=4, heads_k=2)
    config.need("split")
    q, k = torch.randn(2, 4, DIM).to(HALF), torch.randn(90, 2, DIM).to(HALF)
    starts = [torch.tensor(places, dtype=torch.int32) for places in ([0, 1, 1, 2], [0, 30, 40, 90])]
    with deterministic_mode(split_size=BLOCK):
        out = flash_attn_varlen_func(q, k, k, *starts, 1, 50)
        alone = [
            flash_attn_func(q[None, i : i + 1], part[None], part[None])
            for i, part in enumerate((k[:30], k[40:]))
        ]
    assert torch.equal(out.view(torch.int16), torch.cat([rows[0] for rows in alone]).view(torch.int16))


@pytest.mark.parametrize("where", ROUTES)
def test_nothing_is_read_past_the_end_of_a_cache(where: str) -> None:
    """Where a cache length passes the cache by blocks, rows that would need the rest are NaN, and no other."""
    config = built(heads=1, heads_k=1)
    config.need("split")
    q, k = torch.randn(2, 70, 1, DIM).to(HALF), torch.randn(2, 2 * BLOCK, 1, DIM).to(HALF)
    lengths = torch.tensor([2 * BLOCK, 4 * BLOCK], dtype=torch.int32)  # behind the last nothing is allotted
    with deterministic_mode(split_size=BLOCK), route(where):
        out = flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("where", ROUTES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("capacity", "length"), [(300, 301), (300, 302), (300, 380), (96, 97), (96, 1000), (256, 257)]
)
def test_a_cache_ends_where_it_ends(capacity: int, length: int, causal: bool, where: str) -> None:
    config = built(heads=1, heads_k=1, causal=causal)
    config.need("split")
    assert_that_a_cache_ends_where_it_ends(config, capacity, length, where, mode=True)


@pytest.mark.parametrize("length", [301, 1000])
def test_a_cache_ends_where_it_ends_with_the_mode_off(machine: Machine, length: int) -> None:
    config = built(heads=1, heads_k=1)
    config.need("fwd", "split")
    for processors in (1, 132):  # the standard kernel, and splits
        machine.set(processors=processors)
        assert_that_a_cache_ends_where_it_ends(config, 300, length, "as the GPU is filled", mode=False)


@pytest.mark.parametrize(("filled", "new", "queries"), [(127, 1, 10), (100, 1, 100), (-5, 8, 10), (-5, 8, 2)])
def test_rotary_tables_end_where_they_end(filled: int, new: int, queries: int) -> None:
    config = built(heads=1, heads_k=1, causal=True)
    config.need("split")
    assert_that_rotary_tables_end_where_they_end(config, filled, new, queries)


@pytest.mark.parametrize("where", ["in one thread block", "apart"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    ("before", "window"), [(0, 16), (100, 0), (5, 2 * BLOCK - 1), (5, 2 * BLOCK), (5, 2 * BLOCK + 1)]
)
@pytest.mark.parametrize(("queries", "page"), [(1, 0), (70, 256), (70, 16), (1, 48)])
def test_new_keys_that_no_window_reaches_are_appended(
    queries: int, page: int, before: int, window: int, mask: bool, where: str
) -> None:
    config = built(heads=2, heads_k=1, window=(window, 0), mask=mask)
    config.need("split")
    assert_that_all_new_keys_are_appended(
        config, before, 4 * BLOCK - before, where, BLOCK, queries, page=page
    )


@pytest.mark.parametrize("queries", [1, 70])
def test_new_keys_that_no_window_reaches_are_appended_with_the_mode_off(
    machine: Machine, queries: int
) -> None:
    config = built(heads=2, heads_k=1, window=(16, 0))
    config.need("split")
    for processors in (1, 132):  # in one thread block, and in splits
        machine.set(processors=processors)
        assert_that_all_new_keys_are_appended(
            config, 5, 4 * BLOCK - 5, "as the GPU is filled", BLOCK, queries, mode=False
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("where", "mode"), [("in one thread block", True), ("apart", True), ("as the GPU is filled", False)]
)
def test_a_cache_s_tokens_may_lie_far_apart(where: str, mode: bool, causal: bool) -> None:
    config = built(heads=1, heads_k=1, causal=causal)
    config.need("split")
    assert_that_a_cache_s_tokens_may_lie_far_apart(config, where, mode)


def test_the_emulator_finds_a_read_outside_an_allocation() -> None:
    """Packed keys that end before cu_seqlens says: the kernel reads past the end, and the emulator must say so."""
    config = built(heads=1, heads_k=1)
    config.need("split")
    q, k = torch.randn(4, 1, DIM).to(HALF), torch.randn(300, 1, DIM).to(HALF)
    with (
        deterministic_mode(split_size=BLOCK),
        pytest.raises(RuntimeError, match="read of 16 bytes outside any allocation"),
    ):
        flash_attn_varlen_func(q, k, k, cu_seqlens((4,)), cu_seqlens((380,)), 4, 380)


@pytest.mark.parametrize(("capability", "kib"), [("80", 163), ("89", 99), ("120", 99)])
def test_the_emulator_is_the_gpu_that_was_asked_for(capability: str, kib: int) -> None:
    code = """
import ctypes, torch, flash_attn_2_cuda
library, value = ctypes.CDLL(str(flash_attn_2_cuda._LIBRARY)), ctypes.c_int()
for attribute in (75, 76, 97):  # major, minor, the most shared memory of a block
    assert library.cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0) == 0
    print(value.value)
"""
    env = {**os.environ, "FORK_EMULATED_GPU": capability}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    major, minor, shared = (int(word) for word in done.stdout.split())
    assert (f"{major}{minor}", shared) == (capability, kib * 1024)


def test_the_emulator_finds_a_misaligned_address() -> None:
    config = built(heads=1, heads_k=1)
    config.need("split")
    q = torch.randn(64 * DIM + 1).to(HALF)[1:].view(1, 64, 1, DIM)
    with deterministic_mode(split_size=BLOCK), pytest.raises(RuntimeError, match="misaligned"):
        flash_attn_2_cuda.fwd(q, q, q, None, None, 0.0, 1.0, False, -1, -1, 0.0, False, None)


@pytest.mark.parametrize(("first", "gap"), [(1, 0), (0, 1), (4, 4)])
def test_a_cache_whose_rows_no_kernel_can_load_is_an_error(first: int, gap: int) -> None:
    built().need("split")
    q, good = (torch.zeros(1, length, 2, DIM).to(HALF) for length in (1, 256))
    bad = begun_at(good, first, gap)
    for name, caches in (("k_cache", (bad, good)), ("v_cache", (good, bad))):
        with pytest.raises(ValueError, match=f"{name} .*begin at no multiple of 16 bytes"):
            flash_attn_with_kvcache(q, *caches)


def test_a_cache_whose_head_dim_is_no_multiple_of_eight_is_padded() -> None:
    """As upstream has it, new keys written back: its rows begin anywhere, but what kernels load is a copy."""
    built().need("split")
    odd = DIM - 5
    q, cache = torch.randn(2, 3, 2, odd).to(HALF), torch.randn(2, 300, 2, odd).to(HALF)
    lengths = torch.tensor([7, 200], dtype=torch.int32)
    whole = [torch.nn.functional.pad(t, [0, 5]) for t in (q, cache, cache)]
    options = {"cache_seqlens": lengths, "softmax_scale": odd**-0.5}
    expected = flash_attn_with_kvcache(*whole, whole[0], whole[0], **options)
    keys, values = cache.clone(), cache.clone()
    assert torch.equal(flash_attn_with_kvcache(q, keys, values, q, q, **options), expected[..., :odd])
    for kept, padded in zip((keys, values), whole[1:], strict=True):
        assert torch.equal(kept, padded[..., :odd])


@pytest.mark.parametrize(("first", "gap"), [(1, 0), (0, 1)])
def test_queries_of_a_cache_and_new_keys_are_read_alike_wherever_they_lie(first: int, gap: int) -> None:
    config = built(heads=2, heads_k=1)
    config.need("split")
    sequence = Draw(5).sequence(config, 9, 300)
    results = []
    for place in ((0, 0), (first, gap)):
        caches = [torch.zeros(1, 512, 1, DIM).to(HALF) for _ in range(2)]
        filled = torch.tensor([0], dtype=torch.int32)
        with deterministic_mode(split_size=256):
            q, k, v = (begun_at(t[None], *place) for t in (sequence.q, sequence.k, sequence.v))
            out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=filled)
        results.append([out, *caches])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(results[1][1][0, :300], sequence.k)


@pytest.mark.parametrize(("where", "launches"), [("in one thread block", 1), ("apart", 2)])
def test_where_chunks_are_folded(machine: Machine, where: str, launches: int) -> None:
    """Apart: the split kernel and the combine kernel."""
    config = built(heads=1, heads_k=1)
    config.need("split")
    sequence = Draw(3).sequence(config, 3, 2 * BLOCK + 1)
    before = machine.launches
    with deterministic_mode(split_size=BLOCK), route(where):
        dense(config, [sequence])
    assert machine.launches == before + launches


@pytest.mark.parametrize("len_q", [100, 130])  # in tiles of 128 rows where they may be; of 64
@pytest.mark.parametrize("resident", [1, 7])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_chunks_fold_in_turns_in_whatever_order_thread_blocks_run(
    machine: Machine, order: int, resident: int, len_q: int
) -> None:
    """A launch more combines what is left: one partial result of each row."""
    config = built(heads=2, heads_k=1, causal=True)
    config.need("split")
    sequence = Draw(7).sequence(config, len_q, 9 * BLOCK + 5)
    machine.set(order=order, resident=resident)
    taken = {}
    with deterministic_mode(split_size=BLOCK):
        with route("in one thread block"):
            expected = dense(config, [sequence])
        for where in ("apart", "apart, in turns"):
            before = machine.launches
            machine.watch_memory()
            with route(where):
                dense(config, [sequence]).assert_same(expected, where)
            assert machine.launches == before + 2
            taken[where] = machine.largest_allocation
    assert taken["apart, in turns"] < 0.5 * taken["apart"]


@pytest.mark.parametrize("page", [16, 128, 256])
def test_chunks_of_a_cache_in_pages_fold_in_turns(page: int) -> None:
    """Not in tiles of 128 rows, whose kernel reads no pages. The cache has room for more chunks than there are."""
    config = built(heads=2, heads_k=1, causal=True)
    config.need("split")
    draw = Draw(7)
    sequences = [draw.sequence(config, 100, keys) for keys in (3 * BLOCK + 5, 7 * BLOCK)]
    with deterministic_mode(split_size=BLOCK), route("apart, in turns"):
        for which, sequence in enumerate(sequences):
            got = paged(config, sequences, draw.generator, which, page)
            got.assert_same(dense(config, [sequence]), str(which))


@pytest.mark.parametrize(
    ("len_q", "blocks", "more", "in_turns"),
    [(33, 4, 0, True), (33, 4, -1, False), (32, 4, 0, False), (33, 1, 0, DIM >= 96)],
)
def test_chunks_fold_in_turns_where_they_are_many_and_long_and_tiles_are_full(
    machine: Machine, len_q: int, blocks: int, more: int, in_turns: bool
) -> None:
    """One multiprocessor has two chunks of a block of rows at work. Shorter ones than 12288 / DIM keys would wait for each other."""
    config = built(heads=1, heads_k=1)
    config.need("split")
    chunks = max(12, math.ceil(294912 / (blocks * BLOCK * DIM))) + more
    sequence = Draw(7).sequence(config, len_q, chunks * blocks * BLOCK)
    machine.set(processors=1)
    executed = []
    with deterministic_mode(split_size=blocks * BLOCK):
        for where in ("as the GPU is filled", "apart, in turns"):
            before = machine.instructions
            with route(where):
                dense(config, [sequence])
            executed.append(machine.instructions - before)
    assert (executed[0] == executed[1]) == in_turns


# Above, registers have no room for them; nor has shared memory for two thread blocks where it is small.
TALL = DIM < 64 or (DIM == 64 and not SMALL)


def test_rows_that_fold_in_turns_share_keys_where_hardly_any_row_of_a_tile_is_empty(machine: Machine) -> None:
    """Tiles of 128 rows load keys once where two of 64 load them twice."""
    config = built(heads=1, heads_k=1)
    config.need("split")

    def executed(len_q: int, where: str) -> int:
        sequence = Draw(7).sequence(config, len_q, 4 * BLOCK)
        before = machine.instructions
        with route(where):
            dense(config, [sequence])
        return machine.instructions - before

    in_turns, low = "apart, in turns", "apart, in turns, in tiles of 64 rows"
    with deterministic_mode(split_size=BLOCK):
        for len_q in (64, 192):
            assert executed(len_q, in_turns) == executed(len_q, low)
        fewer = executed(128, low) - executed(128, in_turns)
    assert fewer > 0 if TALL else fewer == 0


@pytest.mark.parametrize(("more", "pays"), [(0, True), (-2, False)])
def test_rows_that_fold_in_turns_share_keys_where_walks_are_many(
    machine: Machine, more: int, pays: bool
) -> None:
    """Two multiprocessors have four walks of a tile of 128 rows at work. With fewer in all, waiting takes longer than it spares."""
    config = built(heads=1, heads_k=1)
    config.need("split")
    at_work, fold = 4, 30 << 10  # in keys times head dim, as fork_split.h has it
    blocks = math.ceil(fold * at_work / 4 / (2 * BLOCK * DIM))  # of a chunk, so that its walk is long enough
    walk = 2 * blocks * BLOCK * DIM
    chunks = 2 * max(6 * at_work, math.ceil(3 * fold * at_work**2 / walk)) + more
    sequence = Draw(7).sequence(config, 128, chunks * blocks * BLOCK)
    machine.set(processors=2)
    executed = {}
    with deterministic_mode(split_size=blocks * BLOCK):
        for where in ("as the GPU is filled", "apart, in turns", "apart, in turns, in tiles of 64 rows"):
            before = machine.instructions
            with route(where):
                dense(config, [sequence])
            executed[where] = machine.instructions - before
    filled, tall, low = executed.values()
    assert tall < low if TALL else tall == low
    assert filled == (tall if pays else low)


def test_the_number_of_processors_decides_where(machine: Machine) -> None:
    config = built(heads=2, heads_k=2)
    config.need("split")
    sequence = Draw(3).sequence(config, 3, 2 * BLOCK + 1)
    counts = []
    for processors in (132, 1):
        machine.set(processors=processors)
        before = machine.launches
        with deterministic_mode(split_size=BLOCK):
            dense(config, [sequence])
        counts.append(machine.launches - before)
    assert counts == [2, 1]


@problems(15)
@given(
    configs(),
    lengths_q,
    st.integers(1, 2000),
    splits,
    seeds,
    st.sampled_from([0, 0, -900]),
    st.sampled_from([0, 0, -40]),
)
def test_chunks_fold_to_the_same_bits_whichever_kernel_folds(
    config: Config, len_q: int, len_k: int, split: int, seed: int, slack: int, slack_q: int
) -> None:
    """Also where the caller names lengths that are too short, and rows become NaN."""
    config.need("split")
    draw = Draw(seed)
    sequences = [draw.sequence(config, len_q, len_k), draw.sequence(config, 50, 300)]
    longest_q, longest_k = max(len_q, 50), max(len_k, 300)
    results = []
    for where in ROUTES:
        with deterministic_mode(split_size=split), route(where):
            results.append(
                [
                    varlen(
                        config,
                        sequences,
                        i,
                        slack=max(slack, 1 - longest_k),
                        slack_q=max(slack_q, 1 - longest_q),
                    )
                    for i in (0, 1)
                ]
            )
    for where, others in zip(list(ROUTES)[1:], results[1:], strict=True):
        for one, other in zip(results[0], others, strict=True):
            other.assert_same(one, where)


@problems(15)
@given(
    configs(),
    st.integers(1, 3),
    st.one_of(st.integers(1, 20), st.integers(1, 200)),
    st.integers(1, 900),
    splits,
    seeds,
    st.integers(1, 10**6),
)
def test_slices_of_a_call_have_its_bits_and_share_scratch(
    config: Config, batch: int, len_q: int, len_k: int, split: int, seed: int, budget: int
) -> None:
    """Two launches a slice; a slice takes the budget, or one chunk of one block of rows of one head."""
    config.need("split")
    draw = Draw(seed)
    sequences = [draw.sequence(config, len_q, len_k) for _ in range(batch)]
    results = []
    with deterministic_mode(split_size=split), route("apart"):
        for own_budget in (0, budget):
            with scratch(own_budget):
                before = MACHINE.launches
                MACHINE.watch_memory()
                results.append([dense(config, sequences, which) for which in range(batch)])
                launches, largest = (MACHINE.launches - before) // batch, MACHINE.largest_allocation
    for sliced, whole in zip(*results, strict=True):
        sliced.assert_same(whole, f"in slices of {budget} bytes")
    chunks, dim = -(-len_k // split), -(-config.head_dim // 32) * 32
    rows, heads = len_q, config.heads
    scored = config.alibi or config.mask or bool(config.bias)
    if len_q <= 16 and not scored:
        rows, heads = len_q * heads // config.heads_k, config.heads_k  # the heads of a group are rows
    elif len_q == 1 and config.window == (-1, -1) and not config.alibi:
        rows, heads = heads // config.heads_k, config.heads_k
    if chunks == 1:
        assert launches == 1
        return
    row = chunks * dim * 4  # of accumulators
    chunk = min(rows, 64) * dim * 4
    pieces = -(-chunks // max(1, budget // chunk)) if chunks * chunk > budget else 1  # of a block's chunks
    least = -(-batch * heads * rows * row // max(budget, row * min(rows, 64)))
    most = batch * heads * -(-rows // 64)
    assert 2 * min(least, most) <= launches <= 2 * most * pieces
    inputs = 4 * max(
        batch * len_q * config.heads * config.head_dim,
        batch * config.heads * len_q * len_k,
        batch * len_k * config.heads_k * config.head_dim,
    )
    assert largest <= max(inputs, (max(budget, chunk) + chunk) * (dim + 2) // dim + 1024)


@pytest.mark.parametrize("budget", [1, 70 * 2 * (DIM + 2) * 4])
@problems(10)
@given(
    configs(),
    st.integers(1, 140),
    st.integers(1, 700),
    st.lists(st.tuples(st.integers(0, 140), st.integers(0, 700)), max_size=2),
    seeds,
    st.data(),
)
def test_slices_of_every_layout_have_its_bits(
    budget: int,
    config: Config,
    len_q: int,
    len_k: int,
    others: list[tuple[int, int]],
    seed: int,
    data: st.DataObject,
) -> None:
    """Blocks of rows of one head, or more. Also where sequences are shorter than others, and where a call names too few queries."""
    config.need("split")
    draw = Draw(seed)
    own = draw.sequence(config, len_q, len_k)
    packed = [draw.sequence(config, q, k) for q, k in others]
    place = data.draw(st.integers(0, len(packed)))
    packed.insert(place, own)
    slack_q = data.draw(st.sampled_from([0, 0, max(-40, 1 - max(len(s.q) for s in packed))]))
    cached = [own, draw.sequence(config, len_q, data.draw(lengths_k))]
    results = []
    with deterministic_mode(split_size=BLOCK), route("apart"):
        for own_budget in (0, budget):
            with scratch(own_budget):
                rows = [
                    varlen(config, packed, place, slack_q=slack_q),
                    cache(config, cached, max(len(s.k) for s in cached) + 9),
                ]
                results.append([*rows, paged(config, cached, Draw(1).generator)])
    for name, whole, sliced in zip(("packed", "in a cache", "paged"), *results, strict=True):
        sliced.assert_same(whole, f"{name}, in slices of {budget} bytes")


@pytest.mark.parametrize("budget", [1, 70 * 4 * (DIM + 2) * 4])
def test_slices_append_what_the_call_appends(budget: int) -> None:
    config = built(heads=2, heads_k=1, window=(BLOCK, 0))
    config.need("split")
    with scratch(budget):
        assert_that_all_new_keys_are_appended(config, 5, 4 * BLOCK - 5, "apart", BLOCK, 140)


SHARED = 99 if SMALL else 163  # KiB of a thread block, at least
if SHARED * 1024 < (64 + 2 * BLOCK) * 2 * DIM + 64 * 4 * DIM + 512:  # --arch 89 from head dim 128 on

    @pytest.mark.parametrize("causal", [False, True])
    def test_prefill_without_room_to_fold_takes_little_scratch(machine: Machine, causal: bool) -> None:
        """However many rows there are for the GPU. Each sequence is then a slice."""
        config = built(heads=1, heads_k=1, causal=causal)
        config.need("split")
        draw = Draw(21)
        sequences = [draw.sequence(config, 300, 3 * BLOCK) for _ in range(4)]
        machine.set(processors=1)
        results = []
        for budget in (0, 3 * 300 * (DIM + 2) * 4):
            before = machine.launches
            machine.watch_memory()
            with deterministic_mode(split_size=BLOCK), scratch(budget):
                results.append(dense(config, sequences, 3))
            assert machine.launches == before + (8 if budget else 2)
        assert machine.largest_allocation <= budget
        results[1].assert_same(results[0], "in slices")


@pytest.mark.parametrize("window", [(-1, -1), (40 * BLOCK, 0)])
def test_a_row_has_more_chunks_than_a_warp_has_lanes(window: tuple[int, int]) -> None:
    """Some of them without a key that it sees: the first, the last, and beside the end of a group of lanes."""
    config = built(heads=1, heads_k=1, window=window, mask=True)
    config.need("split")
    sequence = Draw(8).sequence(config, 3, 69 * BLOCK + 5)
    assert sequence.mask is not None
    for chunk in (0, 5, 36, 37, 38, 69):
        sequence.mask[..., chunk * BLOCK : (chunk + 1) * BLOCK] = False
    results = []
    for where in ROUTES:
        with deterministic_mode(split_size=BLOCK), route(where):
            results.append(dense(config, [sequence]))
    assert results[0].out.isfinite().all()
    for where, result in zip(list(ROUTES)[1:], results[1:], strict=True):
        result.assert_same(results[0], where)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("scale", [0.0, -0.125, math.nan])
def test_a_scale_that_is_not_positive_is_an_error(scale: float, softcap: float) -> None:
    config = built(heads=1, heads_k=1)
    config.need("split")
    sequence = Draw(5).sequence(config, 3, 2 * BLOCK)
    q, k, v = (t[None] for t in (sequence.q, sequence.k, sequence.v))
    with (
        deterministic_mode(split_size=BLOCK),
        pytest.raises(ValueError, match=r"softmax_scale=\S+ is not greater than 0"),
    ):
        flash_attn_func(q, k, v, softmax_scale=scale, softcap=softcap)


def test_a_call_within_a_chunk_leaves_others_room_to_fold() -> None:
    """The limit of a kernel's shared memory is not lowered, from head dim 64 on: below there is none."""
    config = built(heads=1, heads_k=1)
    config.need("split")
    draw = Draw(6)
    with deterministic_mode(split_size=BLOCK), route("in one thread block"):
        for length in (2 * BLOCK, 3, 2 * BLOCK):
            dense(config, [draw.sequence(config, 3, length)])

"""With the mode on, keys are cut at fixed positions: rows have the same bits whichever way a call takes."""

from __future__ import annotations

import warnings
from typing import Any

import machine
import pytest
import torch
from bits import Rows, assert_same_bits, bits, same_bits
from calls import _packed, dense, dense_gradients, varlen, varlen_gradients
from cases import FORWARD, LENGTH, PAGES, neighbour, own, row
from flash_attn.cute import (
    deterministic_mode,
    flash_attn_func,
    flash_attn_varlen_func,
    fork_split,
    interface,
    set_deterministic_mode,
)
from problems import Config, draw, reference
from ways import CHUNKED, MOST, OWN_TILES, SPLIT, assert_same, both_paths, by, by_itself, path, peak

pytestmark = pytest.mark.gpu

chunked = pytest.mark.parametrize("config", CHUNKED, ids=str)


@pytest.mark.parametrize("layout", FORWARD)
@chunked
def test_rows_are_those_of_the_sequence_alone(config: Config, layout: str) -> None:
    with deterministic_mode(split_size=SPLIT):
        for alone, other in FORWARD[layout](config):
            assert_same(alone, other, layout)


@pytest.mark.parametrize("length", [SPLIT, SPLIT + 1, LENGTH, 2048])
@chunked
def test_walked_and_spread_chunks_give_the_same_bits(config: Config, length: int) -> None:
    assert_same(by("walked", config, length=length), by("spread", config, length=length), f"{length} keys")


@chunked
def test_packed_chunks_give_the_same_bits(config: Config) -> None:
    """Also of sequences without a chunk of their own at the ends of others."""
    mine = own(config)
    packed = [neighbour(config, 1), mine, neighbour(config, 300), neighbour(config, SPLIT)]
    results = []
    for name in ("walked", "spread"):
        with path(name), deterministic_mode(split_size=SPLIT):
            results += [varlen(config, packed, which) for which in (0, 1, 3)]
    for walked, spread in zip(results[:3], results[3:], strict=True):
        assert_same(walked, spread, "packed")
    assert_same(results[1], by(None, config), "packed")


@pytest.mark.parametrize("name", ["walked", "spread"])
@pytest.mark.parametrize("config", [c for c in CHUNKED if c not in OWN_TILES], ids=str)
def test_one_chunk_has_the_bits_of_the_mode_off(config: Config, name: str) -> None:
    off = dense(config, [own(config)])
    assert_same(by(name, config, split_size=2048), off, "one chunk")
    assert_same(by(None, config, split_size=2048), off, "one chunk")


@chunked
def test_control_other_positions_give_other_bits(config: Config, control: Any) -> None:
    rows = by(None, config)
    control(not same_bits(rows.out, by(None, config, split_size=512).out))
    control(not same_bits(rows.out, dense(config, [own(config)]).out))


@pytest.mark.parametrize("name", ["walked", "spread"])
@chunked
def test_accuracy_is_that_of_the_mode_off(config: Config, name: str) -> None:
    """Within twice the largest error, against float64."""
    exact = reference(config, own(config)).rows
    off, on = dense(config, [own(config)]), by(name, config)
    for what in ("out", "lse"):
        errors = [(getattr(r, what).double() - getattr(exact, what)).abs().max().item() for r in (on, off)]
        assert errors[0] <= 2 * errors[1] + 1e-6, what


@chunked
def test_gradients_are_those_of_the_sequence_alone(config: Config) -> None:
    """Of calls that do not say ``deterministic=True``."""
    set_deterministic_mode(True, SPLIT)
    mine = own(config)
    batch = [mine if i == 3 else neighbour(config, LENGTH, i) for i in range(5)]
    alone = dense_gradients(config, [mine], deterministic=False)
    among = dense_gradients(config, batch, 3, deterministic=False)
    for name in "qkv":
        assert_same_bits(alone[name], among[name], f"d{name}")


@pytest.mark.parametrize("config", [Config(64), Config(128, causal=True, heads=8, heads_k=2)], ids=str)
def test_keys_without_queries_have_gradients_of_zero(config: Config) -> None:
    """And the sequences beside them have their own. What gradients are written over is NaN."""
    mine = own(config)
    sequences = [draw(config, 0, 200), mine, draw(config, 0, 9)]
    q, k, v, dout = (torch.cat([getattr(s, name) for s in sequences]) for name in ("q", "k", "v", "dout"))
    _, places = _packed(sequences)
    options = {"causal": config.causal, **places}
    with deterministic_mode(), torch.no_grad():
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **options)
        given = {f"d{n}": torch.full_like(t, torch.nan) for n, t in (("q", q), ("k", k), ("v", v))}
        dq, dk, dv, *_ = interface._flash_attn_bwd(
            q, k, v, out, dout, lse, deterministic=True, **given, **options
        )
    with deterministic_mode():
        alone = dense_gradients(config, [mine])
    for name, gradient in (("k", dk), ("v", dv)):
        before, own_rows, after = gradient.split([200, LENGTH, 9])
        assert not before.any()
        assert not after.any()
        assert_same_bits(alone[name], own_rows, f"d{name}")
    assert_same_bits(alone["q"], dq, "dq")


def test_more_sequences_than_a_scheduler_walks() -> None:
    """Above 256 upstream finds a tile's sequence by a table, in forward and backward."""
    config = Config(128, causal=True, heads=8, heads_k=2)
    mine = own(config, 300)
    packed = [neighbour(config, 5 + i % 40, i) for i in range(299)] + [mine]
    with deterministic_mode(split_size=SPLIT):
        for which in (0, 255, 256, 299):
            assert_same(dense(config, [packed[which]]), varlen(config, packed, which), f"sequence {which}")
        alone, beside = dense_gradients(config, [mine]), varlen_gradients(config, packed, 299)
    for name in "qkv":
        assert_same_bits(alone[name], beside[name], f"d{name}")


def test_gradients_have_the_mode_of_the_forward_call() -> None:
    """Autograd computes them on a thread that the scope does not reach."""
    config = Config(128, heads=2, heads_k=2)
    mine = draw(config, 300, 300)
    inputs = [t[None].requires_grad_() for t in (mine.q, mine.k, mine.v)]
    with deterministic_mode():
        on = flash_attn_func(*inputs)[0]
    off = flash_attn_func(*inputs)[0]
    assert [out.grad_fn.deterministic for out in (on, off)] == [True, False]


def test_a_split_size_that_no_block_fits_is_an_error() -> None:
    with deterministic_mode(split_size=192), pytest.raises(ValueError, match="not a multiple of 128"):
        dense(Config(128), [own(Config(128))])


def test_a_chunk_may_have_fewer_keys_where_blocks_have() -> None:
    config = Config(256, causal=True)
    assert_same(by("walked", config, split_size=192), by("spread", config, split_size=192), "192 keys")


def test_num_splits_is_warned_about_once() -> None:
    mine = own(Config(128))
    q, k, v = (t[None] for t in (mine.q, mine.k, mine.v))
    fork_split._warn_of_splits.cache_clear()
    with deterministic_mode(split_size=SPLIT), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [flash_attn_func(q, k, v, num_splits=n)[0] for n in (4, 4, 1)]
    assert len([w for w in caught if "num_splits" in str(w.message)]) == 1
    assert all(torch.equal(results[0], other) for other in results)


def positive_zeros(rows: Rows) -> bool:
    """Whether no zero of the output has a sign."""
    return not bool((bits(rows.out[rows.out == 0]) != 0).any())


@pytest.mark.parametrize("config", [Config(64, causal=True), Config(128, causal=True)], ids=str)
def test_rows_that_see_no_key_have_the_same_zeros(config: Config) -> None:
    """More queries than keys: the first see none, whatever number of chunks their tile has."""
    mine = draw(config, 1100, 700)
    walked, spread = both_paths(lambda: dense(config, [mine]))
    assert_same(walked, spread, "without keys")
    assert not walked.out[:400].any()
    assert positive_zeros(walked)


@pytest.mark.parametrize("window", [(300, -1), (-1, 50)], ids=str)
@pytest.mark.parametrize("d", MOST)
def test_windows_that_are_open_on_one_side(d: int, window: tuple[int, int]) -> None:
    config = Config(d, window=window)
    mine = own(config)
    assert_same(*both_paths(lambda: dense(config, [mine])), "one-sided")


@pytest.mark.parametrize("heads", [(6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("d", MOST)
def test_groups_that_divide_no_tile(d: int, heads: tuple[int, int]) -> None:
    config = Config(d, causal=True, heads=heads[0], heads_k=heads[1])
    mine = own(config)
    assert_same(*both_paths(lambda: dense(config, [mine])), "groups")


@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_a_scale_that_is_not_positive(scale: float) -> None:
    """Rows are NaN where a tile hides keys, with the mode off as well: -inf times such a scale is no score to hide."""
    config = Config(128)
    for length in (1024, 1100):  # the keys of whole tiles, and of no whole ones
        mine = own(config, length)
        inputs = [t[None] for t in (mine.q, mine.k, mine.v)]

        def call() -> Rows:
            out, lse = flash_attn_func(*inputs, softmax_scale=scale, return_lse=True)
            return Rows(out[0], lse[0])

        walked, spread = both_paths(call)
        assert_same(walked, spread, f"scale {scale}, {length} keys")
        assert torch.equal(walked.out.isnan(), call().out.isnan())
        assert length == 1100 or walked.out.isfinite().all()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("used", [True, False], ids=["used", "capacity"])
def test_a_cache_in_pages_is_as_long_as_it_is(page: int, used: bool) -> None:
    """Without ``seqused_k`` a sequence fills its row of the page table, whatever the call names as the longest."""
    config = Config(128, causal=True, heads=8, heads_k=2)
    pages = 1024 // page
    mine = draw(config, 3, pages * page)
    table = torch.arange(pages, dtype=torch.int32, device=mine.q.device)[None]
    cache = [t.reshape(pages, page, *t.shape[1:]) for t in (mine.k, mine.v)]
    offsets = torch.tensor([0, 3], dtype=torch.int32, device=mine.q.device)
    lengths = torch.tensor([pages * page], dtype=torch.int32, device=mine.q.device) if used else None

    def call() -> Rows:
        out, lse = flash_attn_varlen_func(
            mine.q, *cache, cu_seqlens_q=offsets, max_seqlen_q=3, max_seqlen_k=pages * page + SPLIT,
            seqused_k=lengths, page_table=table, causal=True, return_lse=True,
        )  # fmt: skip
        return Rows(out, lse)

    walked, spread = both_paths(call)
    assert_same(walked, spread, "pages")
    assert_same(walked, by_itself(config, mine), "pages")


def test_a_sequence_that_is_longer_than_the_longest_is_nan() -> None:
    """Nothing is read past the memory of partial results, which has room for two of its chunks."""
    config = Config(64, heads=8, heads_k=2)
    mine, inside = draw(config, 1, 200 * SPLIT), draw(config, 1, 2 * SPLIT)
    q, k, v = (torch.cat([getattr(one, name) for one in (mine, inside)]) for name in "qkv")
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device=q.device)
    keys = torch.tensor([0, 200 * SPLIT, 202 * SPLIT], dtype=torch.int32, device=q.device)
    with path("spread"), deterministic_mode(split_size=SPLIT):
        out = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=keys, max_seqlen_q=1, max_seqlen_k=2 * SPLIT
        )[0]
    assert out[0].isnan().all()
    with path("spread"):
        assert_same_bits(out[1:], by_itself(config, inside).out, "the other sequence")


@pytest.mark.parametrize("length", [9, 10])
def test_a_decode_row_does_not_see_its_neighbours(length: int) -> None:
    """The reported kind: one decode row on a long cache beside a prefill that grows by a token."""
    config = Config(128, heads=8, heads_k=2, causal=True)
    mine = own(config, 5000)
    calls = [mine.piece(4999, 5000), neighbour(config, length)]
    with deterministic_mode(split_size=512):
        whole = row(dense(config, [mine]), 4999, 5000)
        assert_same(whole, varlen(config, calls), f"beside {length}")


def test_prefill_takes_no_memory_beyond_upstreams() -> None:
    config = Config(128, heads=16, heads_k=16, causal=True)
    batch = [own(config, 2048)] * 2
    off = peak(lambda: dense(config, batch))
    with deterministic_mode(split_size=SPLIT):
        assert peak(lambda: dense(config, batch)) == off


def test_spread_chunks_take_bounded_memory() -> None:
    """A few queries on many keys in small chunks."""
    config = Config(128, heads=32, heads_k=8)
    mine = draw(config, 300, 60000)
    with path("spread"), deterministic_mode(split_size=128):
        unbounded = peak(lambda: dense(config, [mine]))
    with deterministic_mode(split_size=128):
        bounded = peak(lambda: dense(config, [mine]))
    if not machine.GPU:
        return  # calls take no memory there
    queries, keys = mine.q.nbytes, mine.k.nbytes
    batch = 2 * queries + 2 * keys  # what the call stacks of its inputs, and its output
    assert bounded - batch <= 1.1 * max(64 << 20, queries + keys) < unbounded - batch

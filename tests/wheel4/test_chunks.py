"""With the mode on, keys are cut at fixed positions: rows have the same bits whichever way a call takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bits import Rows, assert_same_bits, same_bits
from calls import dense, dense_gradients, varlen
from cases import CONFIGS, FORWARD, LENGTH, PAGES, neighbour, own, row
from flash_attn.cute import deterministic_mode, flash_attn_func, fork_split, set_deterministic_mode
from problems import Config, draw, reference

pytestmark = pytest.mark.gpu

SPLIT = 256  # of LENGTH keys five chunks, the last of which ends within a block
CHUNKED = [config for config in CONFIGS if config.head_dim in fork_split.HEAD_DIMS]
chunked = pytest.mark.parametrize("config", CHUNKED, ids=str)


@contextmanager
def path(name: str | None) -> Iterator[None]:
    """Walk the chunks of each call in one thread block, or spread them, whatever its shape."""
    before = fork_split.force_path(name)
    try:
        yield
    finally:
        fork_split.force_path(before)


def by(name: str | None, config: Config, split_size: int = SPLIT, length: int = LENGTH) -> Rows:
    """A sequence alone, its chunks taken one way."""
    with path(name), deterministic_mode(split_size=split_size):
        return dense(config, [own(config, length)])


def assert_same(one: Rows, other: Rows, what: str) -> None:
    assert_same_bits(one.lse, other.lse, f"{what}, lse (head, row)")
    assert_same_bits(one.out, other.out, f"{what}, out (row, head, dim)")


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
@chunked
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


def test_gradients_have_the_mode_of_the_forward_call() -> None:
    """Autograd computes them on a thread that the scope does not reach; the kernel that ran tells."""
    config = Config(128, heads=2, heads_k=2)
    mine = draw(config, 300, 300)
    inputs = [t[None].requires_grad_() for t in (mine.q, mine.k, mine.v)]
    with deterministic_mode():
        on = flash_attn_func(*inputs)[0]
    off = flash_attn_func(*inputs)[0]
    assert [out.grad_fn.deterministic for out in (on, off)] == [True, False]


@pytest.mark.parametrize("config", [Config(96, causal=True), Config(192), Config(256)], ids=str)
def test_other_head_dims_keep_one_split(config: Config) -> None:
    """And so the bits of the mode off."""
    assert_same(by(None, config), dense(config, [own(config)]), str(config))


def test_pages_have_the_bits_of_no_pages_at_every_head_dim() -> None:
    """Head dim 96, full: the one at which upstream's tiles are none that pages can fill."""
    config = Config(96)
    with deterministic_mode(split_size=SPLIT):
        for page in PAGES:
            for alone, other in FORWARD[f"in pages of {page}"](config):
                assert_same(alone, other, f"in pages of {page}")


def test_a_split_size_that_no_block_fits_is_an_error() -> None:
    with deterministic_mode(split_size=192), pytest.raises(ValueError, match="not a multiple of 128"):
        dense(Config(128), [own(Config(128))])


def test_num_splits_is_warned_about_once() -> None:
    mine = own(Config(128))
    q, k, v = (t[None] for t in (mine.q, mine.k, mine.v))
    fork_split._warn_of_splits.cache_clear()
    with deterministic_mode(split_size=SPLIT), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [flash_attn_func(q, k, v, num_splits=n)[0] for n in (4, 4, 1)]
    assert [str(w.message) for w in caught if "num_splits" in str(w.message)] != []
    assert len([w for w in caught if "num_splits" in str(w.message)]) == 1
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("length", [9, 10])
def test_a_decode_row_does_not_see_its_neighbours(length: int) -> None:
    """The reported kind: one decode row on a long cache beside a prefill that grows by a token."""
    config = Config(128, heads=8, heads_k=2, causal=True)
    mine = own(config, 5000)
    calls = [mine.piece(4999, 5000), neighbour(config, length)]
    with deterministic_mode(split_size=512):
        whole = row(dense(config, [mine]), 4999, 5000)
        assert_same(whole, varlen(config, calls), f"beside {length}")


def _peak(call: Callable[[], Any]) -> int:
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def test_prefill_takes_no_memory_beyond_upstreams() -> None:
    config = Config(128, heads=16, heads_k=16, causal=True)
    batch = [own(config, 2048)] * 2
    off = _peak(lambda: dense(config, batch))
    with deterministic_mode(split_size=SPLIT):
        assert _peak(lambda: dense(config, batch)) == off


def test_spread_chunks_take_bounded_memory() -> None:
    """A few queries on many keys in small chunks."""
    config = Config(128, heads=32, heads_k=8)
    mine = draw(config, 300, 60000)
    with path("spread"), deterministic_mode(split_size=128):
        unbounded = _peak(lambda: dense(config, [mine]))
    with deterministic_mode(split_size=128):
        bounded = _peak(lambda: dense(config, [mine]))
    own_size = sum(t.nbytes for t in (mine.q, mine.k, mine.v)) * 2 + mine.q.nbytes
    assert bounded - own_size < 1.5 * max(64 << 20, own_size // 2) < unbounded

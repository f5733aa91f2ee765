"""Tiles, stages, thread blocks and places of results: whichever a call takes, rows have the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import dense
from cases import LENGTH, last, neighbour, own, row
from flash_attn.cute import deterministic_mode, fork_places, fork_rows, fork_split, interface
from problems import Config
from ways import FEW, MOST, OWN_TILES, SPLIT, assert_same, both_paths, by, by_itself, path, peak, tiles

pytestmark = pytest.mark.gpu


SOME = [
    c for d in FEW for c in (FEW[d] if d[0] in MOST else FEW[d][1:2])
]  # a compile of a kernel takes seconds


@pytest.mark.parametrize("name", ["walked", "spread"])
@pytest.mark.parametrize("config", SOME, ids=str)
def test_tiles_of_one_warpgroup_give_the_same_bits(config: Config, name: str) -> None:
    """Of all rows, which tiles of that size have only where the calls are of few rows."""
    usual = by(name, config)
    with tiles(fork_rows.ROWS):
        assert_same(by(name, config), usual, name)


@pytest.mark.parametrize(
    ("packed_rows", "heads", "expected"),
    [
        (1, 8, 64),
        (64, 8, 64),
        (2048, 8, 128),
        (2048, 12, 192),
        (4096, 256, 192),
        (8192, 512, 192),
        (192, 132, 192),
    ],
)
def test_tiles_of_128_rows_are_for_calls_that_would_leave_the_gpu_idle(
    packed_rows: int, heads: int, expected: int
) -> None:
    """2048 rows of 8 heads are 88 tiles of 192 rows, or 128 of 128, on 132 multiprocessors."""
    assert fork_rows.rows_of_tile(192, packed_rows, heads, 132) == expected
    assert fork_rows.rows_of_tile(128, packed_rows, heads, 132) == min(expected, 128)


@pytest.mark.parametrize("name", ["walked", "spread"])
@pytest.mark.parametrize("rows", [128, 192])
def test_new_tokens_on_a_cache_have_the_same_bits_in_every_tile(rows: int, name: str) -> None:
    config = Config(64, heads=8, heads_k=2, causal=True)
    mine = own(config, 3000).piece(2488, 3000)
    with path(name), tiles(rows):
        assert_same(by_itself(config, mine), row(by(None, config, length=3000), 2488, 3000), f"{rows} rows")


RESIDENCIES = [fork_rows.Residency(*stages_and_blocks) for stages_and_blocks in ((1, 1), (1, 2), (2, 1))]


@pytest.mark.parametrize("name", ["walked", "spread"])
@pytest.mark.parametrize("d", MOST)
def test_a_decode_step_has_the_same_bits_in_every_tile(d: int, name: str) -> None:
    config = Config(d, heads=8, heads_k=2)
    mine = last(config, own(config))
    usual = by_itself(config, mine)
    assert_same(usual, row(by(name, config), LENGTH - 1, LENGTH), "last row")
    with path(name), tiles(192 if d == 64 else 128):
        assert_same(by_itself(config, mine), usual, "tiles of prefill")
    for residency in RESIDENCIES:
        with path(name), tiles(fork_rows.ROWS, residency):
            assert_same(by_itself(config, mine), usual, str(residency))


def test_calls_of_few_rows_share_a_multiprocessor() -> None:
    found: dict[tuple[int, bool], fork_rows.Residency] = {}
    for d in (64, 128):
        usual = interface.FwdConfig(192 if d == 64 else 128, 128, True, True)
        assert fork_rows.tile(usual, 65, 132, 132).m_block_size == 128
        cfg = fork_rows.tile(usual, 64, 8, 132)
        assert cfg.m_block_size == 64
        for spread in (False, True):
            found[d, spread] = fork_rows.residency(cfg, fork_split.KernelChunks(16, spread), (d, d), True)
        assert fork_rows.residency(usual, None, (d, d), False) == fork_rows.USUAL
    assert found == {(64, False): (2, 2), (64, True): (3, 2), (128, False): (1, 2), (128, True): (1, 2)}


@pytest.mark.parametrize("config", [c for d in FEW for c in FEW[d]], ids=str)
def test_chunks_walked_in_memory_give_the_same_bits(config: Config) -> None:
    """Beside others, so that a place serves one tile after another."""
    mine = own(config)
    batch = [mine if i == 17 else neighbour(config, LENGTH, i) for i in range(33)]
    with path("walked in memory"), deterministic_mode(split_size=SPLIT):
        assert_same(dense(config, batch, 17), by("spread", config), "in memory")


def test_chunks_walked_in_shared_memory_give_the_same_bits_at_head_dim_96() -> None:
    """Tiles of 128 rows leave room for that; those of 192 keep their results in memory."""
    for config in FEW[96,]:
        with tiles(128):
            assert_same(by("walked", config), by("spread", config), str(config))


@pytest.mark.parametrize(
    "config",
    [Config(d, causal=True, heads=8, heads_k=2) for d in (32, 72, 80, 112, 160)]
    + [Config(192, causal=True, heads=8, heads_k=2, head_dim_v=128), Config(256, head_dim_v=64), Config(72)],
    ids=str,
)
def test_head_dims_between_are_cut_too(config: Config) -> None:
    walked, spread = both_paths(lambda: dense(config, [own(config)]))
    assert_same(walked, spread, str(config))
    mine = last(config, own(config))
    assert_same(row(walked, LENGTH - 1, LENGTH), by_itself(config, mine), "decode")


def test_places_in_memory_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []

    def allocate(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        places, taken = places_of(*arguments)
        found.append(taken)
        return places, taken

    places_of = fork_places.allocate
    monkeypatch.setattr(fork_places, "allocate", allocate)
    config = Config(256, causal=True)
    with deterministic_mode(split_size=SPLIT):
        dense(config, [own(config)] * 3)
    assert len(found) == 1
    warps = 3 * config.heads * -(-LENGTH // 128) * 8
    assert warps <= len(found[0])  # so none waits for a place that another one has not given back
    assert not found[0].any()


def test_tiles_that_are_not_upstreams() -> None:
    """Where bits of one chunk are not those of the mode off."""
    found = {(c.head_dims, c.causal, c.window) for c in OWN_TILES}
    full, ahead = (False, (-1, -1)), (False, (300, 50))
    small = {((d, d), *kind) for d in (192, 256) for kind in (full, (True, (-1, -1)), ahead)}
    assert found == small - {((256, 256), *ahead)} | {((96, 96), *full), ((192, 128), *ahead)}


def test_values_of_more_head_dims_than_keys_keep_one_split() -> None:
    """And so the bits of the mode off."""
    config = Config(64, head_dim_v=128)
    assert_same(by(None, config), dense(config, [own(config)]), str(config))


def test_prefill_takes_bounded_memory_where_results_lie_in_memory() -> None:
    """Its places, however many tiles there are: accumulators of these would be 64 MiB."""
    config = Config(256, heads=16, heads_k=16, causal=True)
    batch = [own(config, 2048)] * 2
    off = peak(lambda: dense(config, batch))
    with deterministic_mode(split_size=SPLIT):
        assert peak(lambda: dense(config, batch)) <= off + (20 << 20)

"""The ways that a call may take with the mode on, and how tests choose one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bits import Rows, assert_same_bits
from calls import dense
from cases import CONFIGS, LENGTH, few_configs_of, own
from flash_attn.cute import deterministic_mode, fork_rows, fork_split, fork_tiles, interface
from problems import Config, Sequence

SPLIT = 256  # of LENGTH keys five chunks, the last of which ends within a block
MOST = [64, 128]  # the head dims of most models, with every feature
FEW = {d: few_configs_of(*d) for d in ((64,), (96,), (128,), (192,), (192, 128), (256,))}
CHUNKED = [c for c in CONFIGS if c.head_dim in MOST] + [
    c for d in list(FEW) if d[0] not in MOST for c in FEW[d]
]


def keys_upstream(config: Config) -> int:
    """The keys of a tile of upstream's."""
    local = config.window != (-1, -1)
    return interface._tile_size_fwd_sm90(*config.head_dims, config.causal, local).n_block_size


OWN_TILES = [c for c in CHUNKED if keys_upstream(c) != fork_tiles.keys_of_block(c.head_dims)]


@contextmanager
def path(name: str | None) -> Iterator[None]:
    """Walk the chunks of each call in one thread block, or spread them, whatever its shape."""
    before = fork_split.force_path(name)
    try:
        yield
    finally:
        fork_split.force_path(before)


@contextmanager
def tiles(rows: int | None, residency: fork_rows.Residency | None = None) -> Iterator[None]:
    """Give each call tiles of so many rows, whatever rows it has, and kernels that lie so on a multiprocessor."""
    before = fork_rows.force(rows, residency)
    try:
        yield
    finally:
        fork_rows.force(*before)


def by(name: str | None, config: Config, split_size: int = SPLIT, length: int = LENGTH) -> Rows:
    """A sequence alone, its chunks taken one way."""
    with path(name), deterministic_mode(split_size=split_size):
        return dense(config, [own(config, length)])


def by_itself(config: Config, sequence: Sequence) -> Rows:
    with deterministic_mode(split_size=SPLIT):
        return dense(config, [sequence])


def assert_same(one: Rows, other: Rows, what: str) -> None:
    assert_same_bits(one.lse, other.lse, f"{what}, lse (head, row)")
    assert_same_bits(one.out, other.out, f"{what}, out (row, head, dim)")


def both_paths(call: Callable[[], Rows]) -> tuple[Rows, Rows]:
    """The rows of a call with its chunks walked, and spread."""
    results = []
    for name in ("walked", "spread"):
        with path(name), deterministic_mode(split_size=SPLIT):
            results.append(call())
    return results[0], results[1]


def peak(call: Callable[[], Any]) -> int:
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before

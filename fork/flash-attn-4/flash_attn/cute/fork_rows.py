"""Calls of few rows, such as a decode step: tiles of 64 rows, and two thread blocks on a multiprocessor.

Calls of more have tiles of 128 rows, where those of 192 would leave multiprocessors idle.

A warpgroup multiplies 64 rows at once, by the same instructions whatever number of warpgroups a tile has. So
rows have the same bits in tiles of 64 as in those of 128 and 192.
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from flash_attn.cute.fork_chunks import KernelChunks

ROWS = 64  # of a warpgroup
MIDDLE = 128
_SHARED = 228 << 10  # bytes of a multiprocessor
_RESERVED = 1 << 10  # of each thread block, by the driver; also what barriers take, aligned
_MOST_STAGES = 3
_MOST_COLUMNS = 192  # of values, whose accumulators the registers of half a multiprocessor hold


class Residency(NamedTuple):
    """How a kernel lies on a multiprocessor."""

    stages: int  # tiles of keys in shared memory at once, and as many of values
    blocks: int  # thread blocks on a multiprocessor at once, at least


USUAL = Residency(2, 1)
_test_rows: int | None = None
_test_residency: Residency | None = None


def force(rows: int | None, residency: Residency | None = None) -> tuple[int | None, Residency | None]:
    """For tests: a tile's rows in each call with chunks, and how it lies (None: as ever); what was before."""
    global _test_rows, _test_residency
    before = _test_rows, _test_residency
    _test_rows, _test_residency = rows, residency
    return before


def forced() -> tuple[int | None, Residency | None]:
    """What tests force at the moment."""
    return _test_rows, _test_residency


def rows_of_tile(usual: int, packed_rows: int, heads: int, num_sms: int) -> int:
    """64 where all rows fit such a tile; 128 where upstream's 192 would leave a tenth more of the GPU idle.

    >>> rows_of_tile(192, 4, 8, 132), rows_of_tile(192, 2048, 8, 132), rows_of_tile(192, 4096, 256, 132)
    (64, 128, 192)
    """
    if packed_rows <= ROWS:
        return ROWS
    time = {rows: -(-(-(-packed_rows // rows) * heads) // num_sms) * rows for rows in (usual, MIDDLE)}
    return MIDDLE if usual > MIDDLE and time[MIDDLE] < 0.9 * time[usual] else usual


def tile(cfg: Any, packed_rows: int, heads: int, num_sms: int) -> Any:
    """The configuration of a call whose sequences have at most so many rows for each tile's head.

    Args:
        cfg: upstream's.
        packed_rows: rows of the longest sequence.
        heads: those of tiles, of all sequences.
        num_sms: multiprocessors.
    """
    rows = _test_rows or rows_of_tile(cfg.m_block_size, packed_rows, heads, num_sms)
    return cfg if rows == cfg.m_block_size else replace(cfg, m_block_size=rows)


def _padded(size: int) -> int:
    return -(-size // 16) * 16


def shared_memory(cfg: Any, head_dims: tuple[int, int], stages: int, stash: int) -> int:
    """The bytes that a thread block takes, with a running result of so many."""
    d, d_v = map(_padded, head_dims)
    elements: int = cfg.m_block_size * d + stages * cfg.n_block_size * (d + d_v)
    if not cfg.mma_pv_is_rs:
        elements += cfg.m_block_size * cfg.n_block_size
    return _RESERVED + 2 * elements + stash


def running_result(cfg: Any, head_dims: tuple[int, int]) -> int:
    """The bytes of a tile's accumulators."""
    rows: int = cfg.m_block_size
    return 4 * rows * _padded(head_dims[1])


@cache
def has_room(cfg: Any, head_dims: tuple[int, int], few_rows: bool) -> bool:
    """Whether shared memory has room for a running result; tiles of 64 rows can have a single stage."""
    stages = 1 if few_rows else USUAL.stages
    return shared_memory(cfg, head_dims, stages, running_result(cfg, head_dims)) <= _SHARED - _RESERVED


def residency(cfg: Any, chunks: KernelChunks | None, head_dims: tuple[int, int], few_rows: bool) -> Residency:
    """As many stages as two thread blocks have room for, or else one; upstream's for other tiles."""
    if not few_rows:
        return USUAL
    if _test_residency is not None:
        return _test_residency
    return _residency(cfg, chunks, head_dims)


@cache
def _residency(cfg: Any, chunks: KernelChunks | None, head_dims: tuple[int, int]) -> Residency:
    walks = chunks is not None and not chunks.spread and not chunks.in_memory
    stash = running_result(cfg, head_dims) if walks else 0
    for blocks in (2, 1) if _padded(head_dims[1]) <= _MOST_COLUMNS else (1,):
        room = _SHARED // blocks - _RESERVED
        for stages in range(_MOST_STAGES, 0, -1):
            if shared_memory(cfg, head_dims, stages, stash) <= room:
                return Residency(stages, blocks)
    return USUAL


def registers(kernel: Any) -> tuple[int, int]:
    """Those of a thread that multiplies and of one that loads. Two thread blocks share a multiprocessor's."""
    if kernel.blocks_per_sm == 1:
        return kernel.num_mma_regs, kernel.num_producer_regs
    if (kernel.blocks_per_sm, kernel.num_wg_mma) != (2, 1):
        raise RuntimeError(
            f"{kernel.blocks_per_sm} thread blocks with {kernel.num_wg_mma} warpgroups that multiply do not "
            "share a multiprocessor's registers; two with one do"
        )
    return (232, 24) if kernel.use_tma_Q and kernel.use_tma_KV else (200, 56)

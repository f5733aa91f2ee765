"""Chunks of keys at fixed positions, in the kernel of SM 9.0: chunk c has the keys from c * split_size on.

A call may be spread: each chunk of its rows has a thread block of its own, which stores a partial result.
"""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from flash_attn.cute import utils
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned
from flash_attn.cute.tile_scheduler import SingleTileScheduler, WorkTileInfo
from quack import layout_utils


class KernelChunks(NamedTuple):
    """What a kernel is compiled for: the blocks of keys in a chunk, and whether chunks are spread."""

    blocks: int
    spread: bool
    in_memory: bool = False  # where a walking kernel keeps its running results


def is_spread(chunks) -> bool:
    return chunks is not None and chunks.spread


def scheduler(chunks, create_tiles, block_info, SeqlenInfoCls):
    """What makes a kernel's scheduler: the one of tiles, less the chunks in which a tile sees no key."""
    if not is_spread(chunks):
        return create_tiles
    return partial(_ChunkScheduler.create, create_tiles, block_info, SeqlenInfoCls, chunks.blocks)


@cute.jit
def _sees_keys(block_info, SeqlenInfoCls, blocks: cutlass.Constexpr, tile_idx, is_valid: Boolean):
    m_block, _, batch_idx, chunk = tile_idx
    batch_there = batch_idx if is_valid else Int32(0)
    n_block_min, n_block_max = block_info.get_n_block_min_max(SeqlenInfoCls(batch_there), m_block)
    n_block_min, n_block_max = _cut(blocks, n_block_min, n_block_max, chunk)
    return is_valid & (n_block_min < n_block_max)


def _heads_first(tile_idx, params):
    """A chunk's heads side by side, not a head's chunks: the heads of a key lie side by side in memory."""
    m_block, head, batch, chunk = tile_idx
    flat = head * params.num_splits + chunk
    return m_block, flat % params.num_head, batch, flat // params.num_head


def _cut(blocks, n_block_min, n_block_max, chunk):
    return cutlass.max(n_block_min, chunk * blocks), cutlass.min(n_block_max, (chunk + 1) * blocks)


def blocks_of_chunk(chunks, n_block_min, n_block_max, split_idx):
    """The blocks of a thread block's chunk, of those that its rows see; all where chunks are not spread."""
    if not is_spread(chunks):
        return n_block_min, n_block_max
    return _cut(chunks.blocks, n_block_min, n_block_max, split_idx)


class _ChunkScheduler:
    """One tile and chunk a thread block, as the scheduler of tiles gives them in tile_idx."""

    def __init__(self, tile_idx, is_valid):
        self.tile_idx, self.is_valid = tile_idx, is_valid

    @staticmethod
    def create(create_tiles, block_info, SeqlenInfoCls, blocks):
        tiles = create_tiles()
        work = tiles.initial_work_tile_info()
        tile_idx = tuple(Int32(i) for i in work.tile_idx)
        if isinstance(tiles, SingleTileScheduler):
            tile_idx = _heads_first(tile_idx, tiles.params)
        is_valid = Boolean(work.is_valid_tile)
        return _ChunkScheduler(tile_idx, _sees_keys(block_info, SeqlenInfoCls, blocks, tile_idx, is_valid))

    def initial_work_tile_info(self):
        return self.get_current_work()

    def get_current_work(self):
        return WorkTileInfo(self.tile_idx, self.is_valid)

    def prefetch_next_work(self):
        pass

    def advance_to_next_work(self):
        self.is_valid = Boolean(False)

    def __extract_mlir_values__(self):
        values = [cutlass.extract_mlir_values(field) for field in (self.tile_idx, self.is_valid)]
        self._counts = [len(own) for own in values]
        return [value for own in values for value in own]

    def __new_from_mlir_values__(self, values):
        tile_idx = cutlass.new_from_mlir_values(self.tile_idx, values[: self._counts[0]])
        is_valid = cutlass.new_from_mlir_values(self.is_valid, values[self._counts[0] :])
        return _ChunkScheduler(tile_idx, is_valid)


def at_row(tensor, before, seqlen, batch_idx, row, *behind):
    """An element or slice of what is laid out as the queries: (…, batch, row, …), or packed (…, row, …)."""
    here = (seqlen.offset_q + row,) if const_expr(seqlen.has_cu_seqlens_q) else (batch_idx, row)
    place = (*before, *here, *behind)
    return tensor[place]


@cute.jit
def store_partial(
    kernel: cutlass.Constexpr, acc_O, softmax, mPartialO, mPartialRows, tiled_mma, tidx, work, seqlen
):
    """Stores a chunk's result.

    mPartialO is (chunks, …, heads, head dim) with the queries' layout between, mPartialRows (2, chunks, …,
    heads): the largest score and the sum.
    """
    m_block, head_idx, batch_idx, chunk = work
    cute.arch.griddepcontrol_launch_dependents()
    mPartialO = assume_tensor_aligned(mPartialO)
    softmax.row_sum.store(utils.warp_reduce(softmax.row_sum.load(), lambda a, b: a + b, width=4))
    acc_mn = layout_utils.reshape_acc_to_mn(acc_O)
    coordinates = cute.make_identity_tensor((kernel.tile_m, kernel.tile_hdimv))
    coordinates = layout_utils.reshape_acc_to_mn(tiled_mma.get_slice(tidx).partition_C(coordinates))
    group = kernel.qhead_per_kvhead if const_expr(kernel.pack_gqa) else 1
    two = cute.make_rmem_tensor(2, cutlass.Float32)
    for r in cutlass.range(cute.size(softmax.row_sum), unroll_full=True):
        packed = m_block * kernel.tile_m + coordinates[r, 0][0]
        row = packed // group
        head = head_idx * group + packed % group
        if row < seqlen.seqlen_q:
            part = at_row(mPartialO, (chunk,), seqlen, batch_idx, row, head, None)
            pairs = cute.local_tile(part, (2,), (None,))
            for p in cutlass.range(cute.size(acc_mn, mode=[1]) // 2, unroll_full=True):
                two[0], two[1] = acc_mn[r, 2 * p], acc_mn[r, 2 * p + 1]
                pair = coordinates[r, 2 * p][1] // 2
                if const_expr(not kernel.check_hdim_v_oob) or pair < cute.size(pairs, mode=[1]):
                    cute.autovec_copy(two, pairs[None, pair])
            if coordinates[r, 0][1] == 0:
                pair = at_row(mPartialRows, (None, chunk), seqlen, batch_idx, row, head)
                pair[0], pair[1] = softmax.row_max[r], softmax.row_sum[r]


def epilogue(kernel):
    """The kernel's epilogue, or where a partial result was stored none."""
    return (lambda *_: None) if is_spread(kernel.chunks) else kernel.epilogue

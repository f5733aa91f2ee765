"""Folds the chunks of a spread call, from the last one that a row sees to the first.

A warp has 64 columns of a row. It takes 32 chunks at once: their loads are all in flight, and a lane has the
largest score and the sum of a chunk, so that the factors are made side by side. What is folded, and in which
order, is as if one chunk came after another.

Loops are not unrolled further: such a kernel runs once, and takes as long as its instructions take to arrive.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from flash_attn.cute import utils
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned
from flash_attn.cute.fork_chunks import at_row
from flash_attn.cute.fork_fold import folded, weights
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.softmax import Softmax

WARPS = 4  # of a thread block
COLUMNS = 2  # of a lane
AHEAD = 32  # chunks in flight, one for each lane
STEP = 4  # chunks of an unrolled loop's body


class Sight(NamedTuple):
    """What decides which keys a row sees; a window's sides are None where it is open."""

    is_causal: bool
    is_local: bool


class CombineChunks:
    """Makes the output and the log-sum-exp of what store_partial stored."""

    def __init__(self, dtype, head_dim_v: int, split_size: int, sight: Sight, scores_are_scaled: bool):
        self.dtype, self.split_size, self.sight = dtype, split_size, sight
        self.scaled = True if scores_are_scaled else None  # by a score_mod
        self.head_dim_v = head_dim_v
        self.parts = -(-head_dim_v // (32 * COLUMNS))  # warps of a row

    @cute.jit
    def __call__(
        self,
        mPartialO: cute.Tensor,
        mPartialRows: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        softmax_scale: Float32,
        seqlen_k: Int32,
        mCuSeqlensQ: cute.Tensor | None,
        mCuSeqlensK: cute.Tensor | None,
        mSeqUsedQ: cute.Tensor | None,
        mSeqUsedK: cute.Tensor | None,
        window_size_left: Int32 | int | None,
        window_size_right: Int32 | int | None,
        learnable_sink: cute.Tensor | None,
        stream: cuda.CUstream = None,
    ):
        mPartialO, mO = assume_tensor_aligned(mPartialO), assume_tensor_aligned(mO)
        scale_log2, _ = utils.compute_softmax_scale_log2(softmax_scale, self.scaled)
        rows = mO.shape[0] if const_expr(mCuSeqlensQ is not None) else mO.shape[0] * mO.shape[1]
        heads = mO.shape[cute.rank(mO) - 2]
        self.kernel(
            mPartialO,
            mPartialRows,
            mO,
            mLSE,
            scale_log2,
            seqlen_k,
            mCuSeqlensQ,
            mCuSeqlensK,
            mSeqUsedQ,
            mSeqUsedK,
            Int32(window_size_left) if window_size_left is not None else None,
            Int32(window_size_right) if window_size_right is not None else None,
            learnable_sink,
            rows,
            heads,
        ).launch(
            grid=[cute.ceil_div(rows * heads * self.parts, WARPS), 1, 1],
            block=[WARPS * 32, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mPartialO: cute.Tensor,
        mPartialRows: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        scale_log2: Float32,
        seqlen_k_static: Int32,
        mCuSeqlensQ: cute.Tensor | None,
        mCuSeqlensK: cute.Tensor | None,
        mSeqUsedQ: cute.Tensor | None,
        mSeqUsedK: cute.Tensor | None,
        window_size_left: Int32 | None,
        window_size_right: Int32 | None,
        learnable_sink: cute.Tensor | None,
        rows: Int32,
        heads: Int32,
    ):
        block, _, _ = cute.arch.block_idx()
        # Not from the thread's index: ptxas of CUDA 13.4 then reads a register never set, at head dim 192.
        lane = cute.arch.lane_idx()
        flat = block * WARPS + cute.arch.warp_idx()
        part = flat % self.parts
        head = flat // self.parts % heads
        row = flat // self.parts // heads
        parts = cutlass.utils.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((COLUMNS, 32, AHEAD, WARPS)), byte_alignment=16
        )
        # It starts while the kernel that stores partial results ends.
        cute.arch.griddepcontrol_wait()
        if row < rows:
            batch_idx = Int32(0)
            if const_expr(mCuSeqlensQ is not None):
                batch_idx = sequence_of(row, mCuSeqlensQ)
            else:
                batch_idx = row // mO.shape[1]
            seqlen = SeqlenInfoQK.create(
                batch_idx,
                rows if const_expr(mCuSeqlensQ is not None) else mO.shape[1],
                seqlen_k_static,
                mCuSeqlensQ,
                mCuSeqlensK,
                mSeqUsedQ,
                mSeqUsedK,
            )
            row = row - (seqlen.offset_q if const_expr(mCuSeqlensQ is not None) else batch_idx * mO.shape[1])
            if row < seqlen.seqlen_q:
                self.combine_row(
                    mPartialO, mPartialRows, mO, mLSE, scale_log2, seqlen, batch_idx, row, head, part, lane,
                    parts[None, lane, None, cute.arch.warp_idx()], window_size_left, window_size_right,
                    learnable_sink,
                )  # fmt: skip

    @cute.jit
    def combine_row(
        self, mPartialO, mPartialRows, mO, mLSE, scale_log2: Float32, seqlen, batch_idx, row, head,
        part: Int32, lane: Int32, parts, window_size_left, window_size_right, learnable_sink,
    ):  # fmt: skip
        first_chunk, num_chunks = self.chunks_of_row(seqlen, row, window_size_left, window_size_right)
        # Where a caller's max_seqlen_k is too short, no memory holds the last chunks, and the row is NaN.
        is_cut = (num_chunks > 0) & (first_chunk + num_chunks > mPartialO.shape[0])
        num_chunks = Int32(0) if is_cut else num_chunks
        softmax = Softmax.create(scale_log2, num_rows=1)
        softmax.reset()
        run = cute.make_rmem_tensor(COLUMNS, Float32)
        run.fill(0.0)
        factors = cute.make_rmem_tensor(cute.make_layout((2, STEP)), Float32)
        terms = cute.make_rmem_tensor(cute.make_layout((COLUMNS + 1, STEP)), Float32)
        copy_ahead = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32 * COLUMNS)
        run_max = -Float32.inf
        run_sum = Float32(0.0)
        # Columns that are none are those of another lane, and not stored.
        pair = cutlass.min(part * 32 + lane, self.head_dim_v // COLUMNS - 1)
        for group in cutlass.range(cute.ceil_div(num_chunks, AHEAD), unroll=1):
            left = num_chunks - group * AHEAD
            last = first_chunk + left - 1
            chunk_max = -Float32.inf
            chunk_sum = Float32(0.0)
            if lane < left:
                chunk_max = at_row(mPartialRows, (0, last - lane), seqlen, batch_idx, row, head)
                chunk_sum = at_row(mPartialRows, (1, last - lane), seqlen, batch_idx, row, head)
            here = cutlass.min(left, AHEAD)
            for j in cutlass.range(here, unroll=STEP):
                of_row = at_row(mPartialO, (last - j,), seqlen, batch_idx, row, head, None)
                cute.copy(copy_ahead, cute.local_tile(of_row, (COLUMNS,), (pair,)), parts[None, j])
            cute.arch.cp_async_commit_group()
            before = largest_before(run_max, chunk_max, lane)
            both, of_run, of_chunk = weights(before, chunk_max, scale_log2)
            run_max = cute.arch.shuffle_sync(both, AHEAD - 1)
            cute.arch.cp_async_wait_group(0)  # a lane reads what it loaded itself
            for step in cutlass.range(cute.ceil_div(here, STEP), unroll=1):
                for i in cutlass.range_constexpr(STEP):
                    j = step * STEP + i
                    factors[0, i] = cute.arch.shuffle_sync(of_run, j)
                    factors[1, i] = cute.arch.shuffle_sync(of_chunk, j)
                    terms[COLUMNS, i] = cute.arch.shuffle_sync(chunk_sum, j)
                    for c in cutlass.range_constexpr(COLUMNS):
                        terms[c, i] = parts[c, j] if j < here else Float32(0.0)
                for i in cutlass.range_constexpr(STEP):
                    old, new = factors[0, i], factors[1, i]
                    run_sum = folded(run_sum, old, terms[COLUMNS, i], new)
                    for c in cutlass.range_constexpr(COLUMNS):
                        run[c] = folded(run[c], old, terms[c, i], new)
        # finalize adds up the sums of four threads.
        softmax.row_max[0] = run_max
        softmax.row_sum[0] = run_sum if lane % 4 == 0 else Float32(0.0)
        sink = Float32(learnable_sink[head]) if const_expr(learnable_sink is not None) else None
        factor = softmax.finalize(sink_val=sink)
        lse = softmax.row_sum[0]
        scale = factor[0]
        if is_cut:
            scale = Float32.nan
            lse = Float32.nan
        result = cute.make_rmem_tensor(COLUMNS, self.dtype)
        for c in cutlass.range_constexpr(COLUMNS):
            result[c] = (run[c] * scale).to(self.dtype)
        if part * 32 + lane == pair:
            of_row = at_row(mO, (), seqlen, batch_idx, row, head, None)
            cute.autovec_copy(result, cute.local_tile(of_row, (COLUMNS,), (pair,)))
        if const_expr(mLSE is not None):
            if part == 0 and lane == 0:
                if const_expr(seqlen.has_cu_seqlens_q):
                    mLSE[head, seqlen.offset_q + row] = lse
                else:
                    mLSE[batch_idx, head, row] = lse

    @cute.jit
    def chunks_of_row(self, seqlen, row, window_size_left, window_size_right):
        """The first chunk in which a row may see a key, and how many there are from it on."""
        begin = Int32(0)
        end = Int32(seqlen.seqlen_k)
        diagonal = row + seqlen.seqlen_k - seqlen.seqlen_q
        if const_expr(self.sight.is_causal):
            end = cutlass.min(end, diagonal + 1)
        if const_expr(self.sight.is_local and window_size_right is not None):
            end = cutlass.min(end, diagonal + 1 + window_size_right)
        if const_expr(self.sight.is_local and window_size_left is not None):
            begin = cutlass.max(begin, diagonal - window_size_left)
        first_chunk = begin // self.split_size
        num_chunks = Int32(0)
        if begin < end:
            num_chunks = (end - 1) // self.split_size + 1 - first_chunk
        return first_chunk, num_chunks


@cute.jit
def largest_before(run_max: Float32, chunk_max: Float32, lane: Int32):
    """The largest score of what is folded before a lane's chunk."""
    found = cute.arch.fmax(chunk_max, run_max)
    # The clamp is 0 for a shuffle upwards, which is not its default in every version of CUTLASS.
    for i in cutlass.range_constexpr(5):
        found = cute.arch.fmax(found, cute.arch.shuffle_sync_up(found, 1 << i, mask_and_clamp=0))
    before = cute.arch.shuffle_sync_up(found, 1, mask_and_clamp=0)
    return before if lane > 0 else run_max


@cute.jit
def sequence_of(row, mCuSeqlensQ):
    """The sequence that a packed row belongs to."""
    low = Int32(0)
    high = Int32(mCuSeqlensQ.shape[0] - 1)
    while high - low > 1:
        middle = (low + high) // 2
        if mCuSeqlensQ[middle] <= row:
            low = middle
        else:
            high = middle
    return low

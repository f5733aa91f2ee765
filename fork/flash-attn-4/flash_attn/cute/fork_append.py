"""What happens to a cache before attention reads it: new keys and values are appended, and embeddings turned.

One small kernel, a thread block for each token. It reads the lengths on the GPU, so that a CUDA graph may
hold it, and says how much of the cache, and which queries, attention may take.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned

THREADS = 128
VECTOR = 8  # elements of 16 bits that a thread moves at once
_LONGEST = 1 << 30  # of lengths, so that sums stay in 32 bits


class Append(NamedTuple):
    """What the kernel is compiled for."""

    in_pages: bool  # else the table of pages has one for each sequence, and the kernel writes it
    rotary: str | None  # "interleaved" or "halves"
    by_row: bool  # each query is turned by its own position, else all by that of the first new key
    ends_at_diagonal: bool  # a query sees no key behind its own


class AppendKernel:
    """Writes new rows into the cache, turned queries, and the lengths that attention reads.

    A sequence that does not fit the cache is cut: nothing is written past its end, and the queries that would
    need the rest are NaN. They are the last ones where queries end at the diagonal, which stays where it was,
    for as many queries and keys are cut; else they are all.
    """

    def __init__(self, dtype, append: Append):
        self.dtype, self.append = dtype, append

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (b, s_q, h, d)
        mTurned: cute.Tensor | None,  # as mQ
        mK: cute.Tensor | None,  # (b, new, h_k, d)
        mV: cute.Tensor | None,  # (b, new, h_k, dv)
        mKCache: cute.Tensor,  # (pages, page_size, h_k, d)
        mVCache: cute.Tensor,  # (pages, page_size, h_k, dv)
        mLengths: cute.Tensor | None,  # (b), without the new ones; None: the cache is full
        mIndices: cute.Tensor | None,  # (b), the sequences of a cache without pages
        mTable: cute.Tensor,  # (b, pages of a sequence)
        mCos: cute.Tensor | None,  # (positions, rotary_dim / 2)
        mSin: cute.Tensor | None,
        mO: cute.Tensor,  # (b, s_q, h, dv)
        mLSE: cute.Tensor | None,  # (b, h, s_q)
        mUsed: cute.Tensor,  # (2, b): queries and keys that attention takes
        stream: cuda.CUstream = None,
    ):
        mQ, mTurned, mK, mV, mKCache, mVCache, mO, mCos, mSin = [
            assume_tensor_aligned(t) if const_expr(t is not None) else None
            for t in (mQ, mTurned, mK, mV, mKCache, mVCache, mO, mCos, mSin)
        ]
        new = mK.shape[1] if const_expr(mK is not None) else Int32(0)
        tokens = cutlass.max(cutlass.max(new, mQ.shape[1]), 1)
        self.kernel(
            mQ, mTurned, mK, mV, mKCache, mVCache, mLengths, mIndices, mTable, mCos, mSin, mO, mLSE, mUsed,
            new, tokens,
        ).launch(grid=[tokens * mQ.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, mQ, mTurned, mK, mV, mKCache, mVCache, mLengths, mIndices, mTable, mCos, mSin, mO, mLSE, mUsed,
        new: Int32, tokens: Int32,
    ):  # fmt: skip
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token = block % tokens
        batch = block // tokens
        capacity = Int32(mTable.shape[1] * mKCache.shape[1])
        length = capacity
        if const_expr(mLengths is not None):
            length = cutlass.min(cutlass.max(mLengths[batch], 0), _LONGEST)
        over = cutlass.max(length + new - capacity, 0)
        queries = Int32(mQ.shape[1])
        if over > 0:
            queries = cutlass.max(queries - over, 0) if const_expr(self.append.ends_at_diagonal) else Int32(0)
        sequence = batch
        if const_expr(mIndices is not None):
            sequence = mIndices[batch]
        if tidx == 0 and token == 0:
            mUsed[0, batch] = queries
            mUsed[1, batch] = cutlass.min(length + new, capacity)
            if const_expr(not self.append.in_pages):
                mTable[batch, 0] = sequence
        if const_expr(mK is not None):
            position = length + token
            if token < new and position < capacity:
                page, row = sequence, position
                if const_expr(self.append.in_pages):
                    page, row = mTable[batch, position // mKCache.shape[1]], position % mKCache.shape[1]
                self.move(mV, batch, token, mVCache, page, row, tidx, Int32(0), None, None)
                self.move(mK, batch, token, mKCache, page, row, tidx, position, mCos, mSin)
        if token < mQ.shape[1]:
            if const_expr(mTurned is not None):
                position = length + token if const_expr(self.append.by_row) else length
                self.move(mQ, batch, token, mTurned, batch, token, tidx, position, mCos, mSin)
            if token >= queries:
                self.poison(mO, mLSE, batch, token, tidx)

    @cute.jit
    def move(self, mFrom, batch, token, mTo, page, row, tidx, position, mCos, mSin):
        """All heads of a token; with tables turned by its position, and NaN where they end before it."""
        pieces = mFrom.shape[3] // VECTOR
        for i in cutlass.range(tidx, mFrom.shape[2] * pieces, THREADS, unroll=1):
            head = i // pieces
            piece = i % pieces
            source = cute.local_tile(mFrom[batch, token, head, None], (VECTOR,), (None,))
            target = cute.local_tile(mTo[page, row, head, None], (VECTOR,), (None,))
            loaded = cute.make_rmem_tensor(VECTOR, self.dtype)
            cute.autovec_copy(source[None, piece], loaded)
            if const_expr(mCos is not None):
                if position >= mCos.shape[0]:
                    loaded.fill(self.dtype(Float32.nan))
                elif piece * VECTOR < 2 * mCos.shape[1]:
                    if const_expr(self.append.rotary == "interleaved"):
                        self.turn_pairs(loaded, mCos[position, None], mSin[position, None], piece)
                    else:
                        self.turn_halves(loaded, source, mCos[position, None], mSin[position, None], piece)
            cute.autovec_copy(loaded, target[None, piece])

    @cute.jit
    def turn_pairs(self, loaded, cos_row, sin_row, piece):
        """Elements 2 i and 2 i + 1. Products of two 16-bit floats are exact, so a sum is rounded once."""
        half = VECTOR // 2
        cos = self.load(cos_row, half, piece)
        sin = self.load(sin_row, half, piece)
        for i in cutlass.range_constexpr(half):
            one = Float32(loaded[2 * i])
            other = Float32(loaded[2 * i + 1])
            loaded[2 * i] = self.dtype(one * cos[i] - other * sin[i])
            loaded[2 * i + 1] = self.dtype(one * sin[i] + other * cos[i])

    @cute.jit
    def turn_halves(self, loaded, source, cos_row, sin_row, piece):
        """Elements i and i + rotary_dim / 2."""
        half = cos_row.shape[0] // VECTOR
        other_piece = piece + half
        pair = piece
        sign = Float32(-1.0)
        if piece >= half:
            other_piece = piece - half
            pair = piece - half
            sign = Float32(1.0)
        cos = self.load(cos_row, VECTOR, pair)
        sin = self.load(sin_row, VECTOR, pair)
        other = cute.make_rmem_tensor(VECTOR, self.dtype)
        cute.autovec_copy(source[None, other_piece], other)
        for i in cutlass.range_constexpr(VECTOR):
            loaded[i] = self.dtype(Float32(loaded[i]) * cos[i] + Float32(other[i]) * (sign * sin[i]))

    def load(self, row, size: cutlass.Constexpr, piece):
        """A piece of a row of the rotary tables, as float32."""
        loaded = cute.make_rmem_tensor(size, self.dtype)
        cute.autovec_copy(cute.local_tile(row, (size,), (None,))[None, piece], loaded)
        floats = cute.make_rmem_tensor(size, Float32)
        floats.store(loaded.load().to(Float32))
        return floats

    @cute.jit
    def poison(self, mO, mLSE, batch, row, tidx):
        """NaN for a query's output in all heads. Attention, which comes next, does not write it."""
        nans = cute.make_rmem_tensor(VECTOR, self.dtype)
        nans.fill(self.dtype(Float32.nan))
        pieces = mO.shape[3] // VECTOR
        for i in cutlass.range(tidx, mO.shape[2] * pieces, THREADS, unroll=1):
            target = cute.local_tile(mO[batch, row, i // pieces, None], (VECTOR,), (None,))
            cute.autovec_copy(nans, target[None, i % pieces])
        if const_expr(mLSE is not None):
            for head in cutlass.range(tidx, mO.shape[2], THREADS, unroll=1):
                mLSE[batch, head, row] = Float32.nan

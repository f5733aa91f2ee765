// Chunks that have thread blocks of their own and are folded by those, in turns.
//
// A block of rows has one running result in memory. The thread block of a chunk, or of two, waits until those
// of later keys have folded theirs, folds its own, and passes the turn on; the last leaves the result where
// fork_combine_kernel finds it, as that of the only chunk. So a call takes memory for one partial result of
// each row, not for one of each chunk, and nobody reads them all again. Chunks are handed out from the last
// to the first, a block of rows after another: those of one block of rows begin apart, and mostly end in
// order.

#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "namespace_config.h"

namespace FLASH_NAMESPACE {
namespace fork_in_turns {

// Of a thread block: kBlockM of the split kernels, and of their tall tiles.
constexpr int kRows = 64, kTallRows = 128;

// Chunks that a thread block of so many rows walks before its turn. A tall one holds the first in shared
// memory, and folds both at once.
constexpr int walked(int block_rows) { return block_rows == kTallRows ? 2 : 1; }

// Of a call whose chunks are folded in turns, in its scratch; else null.
struct Turns {
    int *ticket;     // the next thread block's place; behind it, whether one gave up waiting (fork_turn.h)
    int *turn;       // of each block of rows: how many chunks are folded
    float2 *states;  // of each row: max and sum
    float4 *acc;     // of each block of rows: each thread's accumulators

    __host__ __device__ __forceinline__ bool any() const { return ticket != nullptr; }
    __host__ __device__ __forceinline__ int *given_up() const { return ticket + 1; }
};

inline int64_t row_blocks(int64_t heads, int rows_of_head, int block_rows) {
    return heads * ((rows_of_head + block_rows - 1) / block_rows);
}

// How many partial results of a row scratch holds at once.
template<typename Params>
__host__ __device__ __forceinline__ int64_t kept(const Params &params) {
    return params.fork.turns.any() ? 1 : params.fork.slice.splits;
}

}  // namespace fork_in_turns
}  // namespace FLASH_NAMESPACE

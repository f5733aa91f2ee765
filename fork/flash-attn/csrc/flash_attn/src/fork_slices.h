// Calls whose chunks have thread blocks of their own, in slices that share one scratch buffer.
//
// The partial results of a call's chunks can take more memory than its inputs: 384 queries of 32 heads on
// 2^20 keys, in chunks of 512, leave 12 GiB. So such a call runs slice by slice: a kernel computes the
// partial results of some of the call's rows, a second folds them, and the next slice takes the same memory.
// Where even the chunks of one block of rows are too many, a slice has some of these, the last first, and
// leaves each row's running result to the next. A row's chunks are computed and folded as ever, so no bit
// depends on where a call is cut. fork_split.h says how much memory that is.

#pragma once

#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "namespace_config.h"

namespace FLASH_NAMESPACE {
namespace fork_slices {

constexpr int kRows = 64;  // of a thread block: kBlockM of the split kernels, but for tall tiles

// A part of a call, or the size of the largest: whole sequences, whole heads of one sequence, blocks of rows
// of one head, or some of the splits of one block. Heads whose rows share tiles count as one.
struct Slice {
    int b, h, rows, splits;
    int first_b, first_h, first_row, first_split;
};

// Each row's running result between the splits of one slice and those of the next; null where each slice has
// all splits.
struct Carried {
    float2 *states;  // max and sum
    float *acc;
};

// So many at once that as few slices as the limit allows have nearly the same size.
inline int evenly(const int count, const int64_t limit) {
    const int64_t slices =
        std::max<int64_t>(1, (count + std::max<int64_t>(1, limit) - 1) / std::max<int64_t>(1, limit));
    return int((count + slices - 1) / slices);
}

// The largest slice of a call that fits the budget, where a row takes so many bytes for each of its splits.
// Splits are cut where one block of rows would take more than `most`.
inline Slice largest(const int b, const int h, const int rows, const int splits,
    const int64_t bytes_per_split, const int64_t budget, const int64_t most) {
    const int64_t bytes_per_row = bytes_per_split * splits, head = bytes_per_row * rows;
    if (head > budget) {
        const int block = std::min(rows, kRows);
        const bool cuts = bytes_per_row * block > most;
        return {1, 1,
            std::min(rows, kRows * evenly((rows + kRows - 1) / kRows, budget / (bytes_per_row * kRows))),
            cuts ? evenly(splits, most / (bytes_per_split * block)) : splits};
    }
    if (head * h > budget) { return {1, evenly(h, budget / head), rows, splits}; }
    return {evenly(b, head * h == 0 ? b : budget / (head * h)), h, rows, splits};
}

// Launches for each slice, with params.fork.slice set to it and the grid of its thread blocks of so many
// rows. params.fork.slice is the largest.
template<typename Params, typename Launch>
void each(Params &params, const int block_rows, Launch &&launch) {
    const Slice largest = params.fork.slice;
    const int num_heads = params.h / params.fork.group, num_rows = params.seqlen_q * params.fork.group;
    for (int b = 0; b < params.b; b += largest.b) {
        for (int h = 0; h < num_heads; h += largest.h) {
            for (int row = 0; row == 0 || row < num_rows;
                row += std::max(1, largest.rows)) {  // once where there is no row: an error
                for (int end = params.num_splits; end > 0; end -= largest.splits) {
                    const int splits = std::min(largest.splits, end);
                    const Slice slice{std::min(largest.b, params.b - b), std::min(largest.h, num_heads - h),
                        std::min(largest.rows, num_rows - row), splits, b, h, row, end - splits};
                    params.fork.slice = slice;
                    launch(dim3((slice.rows + block_rows - 1) / block_rows * splits, slice.h, slice.b));
                }
            }
        }
    }
    params.fork.slice = largest;
}

// Rows of partial results: of one chunk, and where a row's is.
__host__ __device__ __forceinline__ int64_t num_rows(const Slice &slice) {
    return int64_t(slice.b) * slice.h * slice.rows;
}
__host__ __device__ __forceinline__ int64_t row_at(
    const Slice &slice, const int n_split_idx, const int bidb, const int bidh, const int row) {
    return ((int64_t(n_split_idx - slice.first_split) * slice.b + bidb - slice.first_b) * slice.h + bidh
               - slice.first_h)
        * slice.rows
        + row - slice.first_row;
}

}  // namespace fork_slices
}  // namespace FLASH_NAMESPACE

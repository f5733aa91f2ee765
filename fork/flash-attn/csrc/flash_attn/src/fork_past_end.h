// Rows of packed results that belong to no sequence: those past cu_seqlens[-1].
//
// The host knows how many rows there are, but not where the last sequence ends. So nothing is launched for
// them. To the last sequence's thread blocks they are rows of its own, past its length: the block that would
// have them fills them with zeros, and the last block all that are left. Other thread blocks compare their
// sequence's number, and no more.

#pragma once

#include <algorithm>
#include <cstdint>

#include "namespace_config.h"
#include "flash.h"

namespace FLASH_NAMESPACE {
namespace fork_past_end {

struct Rows {
    int begin, end;
};

// Those of a block of the last sequence, counted from that one's first row. `total`: of the tensor. None
// where the sequences do not end within it.
__forceinline__ __device__ Rows of_block(const int first_row, const int length, const int total,
    const int block, const int block_rows, const bool is_last_block) {
    const unsigned first_past = unsigned(first_row) + unsigned(length);
    if (first_past >= unsigned(total)) { return {0, 0}; }
    const int left = total - first_row, begin = block * block_rows;
    return {std::max(length, begin), is_last_block ? left : std::min(left, begin + block_rows)};
}

// Zeros in those rows of d elements of two bytes. All threads of the block call it.
__forceinline__ __device__ void clear(
    void *const first_row, const int64_t row_stride, const Rows rows, const int d) {
    const bool is_aligned = (reinterpret_cast<uintptr_t>(first_row) | uintptr_t(row_stride * 2)) % 16 == 0;
    const int step = is_aligned ? 8 : 1, steps = d / step;
    auto *const at = static_cast<uint16_t *>(first_row);
    #pragma unroll 1
    for (int64_t i = threadIdx.x; i < int64_t(rows.end - rows.begin) * steps; i += blockDim.x) {
        uint16_t *const to = at + (rows.begin + i / steps) * row_stride + i % steps * step;
        if (is_aligned) {
            *reinterpret_cast<uint4 *>(to) = make_uint4(0, 0, 0, 0);
        } else {
            *to = 0;
        }
    }
}

// Whether a thread block of this sequence has such rows of out and lse to look for.
__forceinline__ __device__ bool may_have(const Flash_fwd_params &params, const int bidb) {
    return params.fork.packed_rows > 0 && bidb == params.b - 1;
}

// Zeros in those of a block of one head's rows of out and lse. Found anew at the end of a thread block, so
// that nothing of it takes a register before.
__forceinline__ __device__ void clear_results(const Flash_fwd_params &params, const int bidb, const int bidh,
    const int block, const int block_rows, const bool is_last_block) {
    if (!may_have(params, bidb)) { return; }
    const int first = params.cu_seqlens_q[bidb], length = params.cu_seqlens_q[bidb + 1] - first;
    const Rows rows = of_block(first, length, params.fork.packed_rows, block, block_rows, is_last_block);
    clear(static_cast<uint16_t *>(params.o_ptr) + int64_t(first) * params.o_row_stride
            + int64_t(bidh) * params.o_head_stride,
        params.o_row_stride, rows, params.d);
    float *const lse = static_cast<float *>(params.softmax_lse_ptr) + int64_t(bidh) * params.total_q + first;
    for (int row = rows.begin + int(threadIdx.x); row < rows.end; row += blockDim.x) { lse[row] = 0.f; }
}

}  // namespace fork_past_end
}  // namespace FLASH_NAMESPACE

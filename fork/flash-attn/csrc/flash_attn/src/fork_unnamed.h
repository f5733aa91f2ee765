// Gradients that no thread block of the backward pass comes to: they would be what the allocation held.
//
// What lies past the lengths that a packed call names (max_seqlen_q, max_seqlen_k) is NaN. Rows of no
// sequence, which lie past the end of the last, are zeros. The kernel that converts dQ writes them, behind
// the one that makes dK and dV.

#pragma once

#include <algorithm>

#include "namespace_config.h"
#include "block_info.h"
#include "flash.h"

namespace FLASH_NAMESPACE {
namespace fork_unnamed {

// NaN for rows begin to end.
template<typename Element>
__forceinline__ __device__ void poison(
    Element *rows, const int64_t row_stride, const int begin, const int end, const int d) {
    for (int row = begin; row < end; ++row) {
        for (int col = threadIdx.x; col < d; col += blockDim.x) {
            rows[row * row_stride + col] = Element(NAN);
        }
    }
}

// Zeros for rows from begin to end, 16 bytes at once: the thread blocks of a sequence's rows share them.
template<typename Element>
__forceinline__ __device__ void clear(
    Element *rows, const int64_t row_stride, const int begin, const int end, const int d, const int m_block) {
    constexpr int kAtOnce = sizeof(uint4) / sizeof(Element);
    const int pieces = d / kAtOnce;
    const int64_t count = int64_t(end - begin) * pieces, step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(m_block) * blockDim.x + threadIdx.x; i < count; i += step) {
        *reinterpret_cast<uint4 *>(rows + (begin + i / pieces) * row_stride + i % pieces * kAtOnce) = {};
    }
}

// Rows of no sequence, by the thread blocks of the last one.
template<typename Element>
__forceinline__ __device__ void clear_past_the_end(const Flash_bwd_params &params, const BlockInfo<> &binfo,
    const int bidb, const int bidh, const int m_block) {
    if (bidb < params.b - 1 || params.cu_seqlens_q == nullptr) { return; }
    const auto clear_of = [&](void *gradient, const int64_t row_stride, const int64_t head_stride,
                              const int end, const int total) {
        clear(static_cast<Element *>(gradient) + bidh * head_stride, row_stride, max(end, 0), total, params.d,
            m_block);
    };
    const int end_q = binfo.sum_s_q + binfo.actual_seqlen_q, end_k = binfo.sum_s_k + binfo.actual_seqlen_k;
    clear_of(params.dq_ptr, params.dq_row_stride, params.dq_head_stride, end_q, params.total_q);
    clear_of(params.dk_ptr, params.dk_row_stride, params.dk_head_stride, end_k, params.fork_bwd.total_k);
    clear_of(params.dv_ptr, params.dv_row_stride, params.dv_head_stride, end_k, params.fork_bwd.total_k);
}

// Of dK and dV, by the thread block of a sequence's first rows.
template<typename Element>
__forceinline__ __device__ void poison_keys(const Flash_bwd_params &params, const BlockInfo<> &binfo,
    const int bidb, const int bidh, const int m_block) {
    if (m_block > 0 || binfo.actual_seqlen_k <= params.seqlen_k) { return; }
    // Whatever cu_seqlens_k holds
    const int end = std::min(binfo.actual_seqlen_k, params.fork_bwd.total_k - binfo.sum_s_k);
    poison(reinterpret_cast<Element *>(params.dk_ptr)
            + binfo.k_offset(params.dk_batch_stride, params.dk_row_stride, bidb)
            + bidh * params.dk_head_stride,
        params.dk_row_stride, params.seqlen_k, end, params.d);
    poison(reinterpret_cast<Element *>(params.dv_ptr)
            + binfo.k_offset(params.dv_batch_stride, params.dv_row_stride, bidb)
            + bidh * params.dv_head_stride,
        params.dv_row_stride, params.seqlen_k, end, params.d);
}

// All that does not wait for the thread block's own rows.
template<typename Element>
__forceinline__ __device__ void write_others(const Flash_bwd_params &params, const BlockInfo<> &binfo,
    const int bidb, const int bidh, const int m_block) {
    poison_keys<Element>(params, binfo, bidb, bidh, m_block);
    clear_past_the_end<Element>(params, binfo, bidb, bidh, m_block);
}

// Of dQ, by the thread block of the last rows that the call names, once it has written its own.
template<typename Element>
__forceinline__ __device__ void poison_queries(const Flash_bwd_params &params, const BlockInfo<> &binfo,
    const int bidb, const int bidh, const int m_block) {
    if (m_block < int(gridDim.x) - 1 || binfo.actual_seqlen_q <= params.seqlen_q) { return; }
    __syncthreads();  // some of its rows lie past the last that is named
    poison(reinterpret_cast<Element *>(params.dq_ptr)
            + binfo.q_offset(params.dq_batch_stride, params.dq_row_stride, bidb)
            + bidh * params.dq_head_stride,
        params.dq_row_stride, params.seqlen_q,
        std::min(binfo.actual_seqlen_q, params.total_q - binfo.sum_s_q), params.d);
}

}  // namespace fork_unnamed
}  // namespace FLASH_NAMESPACE

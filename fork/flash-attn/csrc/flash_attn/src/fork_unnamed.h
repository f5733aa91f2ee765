// Gradients of what lies past the lengths that a packed call names (max_seqlen_q, max_seqlen_k).
//
// No thread block of the backward pass comes there, so these rows would be what the allocation held. They are
// NaN.

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

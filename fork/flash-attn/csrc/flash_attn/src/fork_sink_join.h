// How a sink joins a row: once, at the end of its fold.
//
// The keys' part of the softmax is what it is without a sink, and so is the log-sum-exp that is written. The
// row is multiplied by the share that the keys have of the whole sum, exp(lse) / (exp(lse) + exp(sink)): in
// one arithmetic, wherever the row ends.

#pragma once

#include <cute/tensor.hpp>

#include <cuda_fp16.h>

#include "namespace_config.h"
#include "flash.h"
#include "fork_sink.h"

namespace FLASH_NAMESPACE {
namespace fork_sink {

// Of a head, or of the head that a row of a group is.
__forceinline__ __device__ float value(const Flash_fwd_params &params, const int bidh, const int row) {
    const Sink &sink = params.fork.sink;
    const int head = sink.rows_are_heads ? bidh * params.seqlen_q + row : bidh;
    switch (sink.type) {
    case Type::fp16:
        return __half2float(static_cast<const __half *>(sink.ptr)[head]);
    case Type::bf16:
        // By hand: cuda_bf16.h has an instruction for it from 9.0 on, and code from shared PTX would differ.
        return __uint_as_float(uint32_t(static_cast<const uint16_t *>(sink.ptr)[head]) << 16);
    default:
        return static_cast<const float *>(sink.ptr)[head];
    }
}

// What the keys of a row have of its sum. Of a row that sees none, whose lse is +inf, nothing is left to
// share.
__forceinline__ __device__ float share(
    const Flash_fwd_params &params, const int bidh, const int row, const float lse) {
    if (params.fork.sink.ptr == nullptr || lse == INFINITY) { return 1.f; }
    constexpr float kLog2e = 1.4426950408889634f;
    const float sink = value(params, bidh, row);
    return __fdividef(1.f, __fadd_rn(1.f, exp2f(__fmul_rn(__fsub_rn(sink, lse), kLog2e))));
}

// Of a row by its place among all of the call's, as upstream's kernel that combines splits has it.
__forceinline__ __device__ float share_of_flat(
    const Flash_fwd_params &params, const int64_t flat, const float lse) {
    return share(params, int(flat / params.seqlen_q % params.h), int(flat % params.seqlen_q), lse);
}

// Multiplies the rows of a tile, as the thread holds them, which are normalised.
template<typename Kernel_traits, typename Acc, typename Lse>
__forceinline__ __device__ void join(
    const Flash_fwd_params &params, const int bidh, const int m_block, Acc &acc_o, const Lse &lse) {
    if (params.fork.sink.ptr == nullptr) { return; }
    auto rowcol = cute::make_tensor(acc_o.data(), FLASH_NAMESPACE::convert_layout_acc_rowcol(acc_o.layout()));
    #pragma unroll
    for (int mi = 0; mi < cute::size<0>(rowcol); ++mi) {
        const int row = m_block * Kernel_traits::kBlockM + mi / 2 * (16 * Kernel_traits::kNWarps)
            + int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4 + mi % 2 * 8;
        // Rows past the sequence's end are not written, and heads past the last not read.
        const float factor = share(params, bidh, min(row, params.seqlen_q - 1), lse(mi));
        #pragma unroll
        for (int ni = 0; ni < cute::size<1>(rowcol); ++ni) {
            rowcol(mi, ni) = __fmul_rn(rowcol(mi, ni), factor);
        }
    }
}

}  // namespace fork_sink
}  // namespace FLASH_NAMESPACE

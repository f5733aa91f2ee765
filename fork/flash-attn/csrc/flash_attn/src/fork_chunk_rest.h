// The part of a running result for which shared memory has no room.

#pragma once

#include <algorithm>

#include <cute/tensor.hpp>

#include "namespace_config.h"
#include "block_info.h"
#include "flash.h"
#include "fork_fold.h"
#include "fork_walking.h"
#include "fork_occupancy.h"
#include "utils.h"

namespace FLASH_NAMESPACE {

using namespace cute;

// At head dim 128 a whole result in shared memory would cost a multiprocessor its second thread block, and
// above there is no room for it at all, or only on some GPUs. A quarter of it, above 128 half, lies in the
// rows of the output, which are written last. It comes back through V's tile, which is free between two
// steps: in registers, its way from memory would take those of the scores and leave every step short of them.
template<typename Kernel_traits>
struct ChunkRest {
    static constexpr int kNThreads = Kernel_traits::kNThreads;
    // Tiles of 16 rows that a thread has
    static constexpr int kM = Kernel_traits::kBlockM / (16 * Kernel_traits::kNWarps);
    static constexpr int kNRows = 2 * kM;
    static constexpr int kN = Kernel_traits::kHeadDim / 8;
    static constexpr int kQuarters = !kWalks<Kernel_traits>
        ? 4
        : fork_occupancy::shared_quarters(
              Kernel_traits::kHeadDim, Kernel_traits::kSmemSize, kNThreads * kM * kN * 16);
    static constexpr bool kNeeded = kQuarters < 4;
    static constexpr int kShared = kN / 4 * kQuarters;  // of kN: what is not of the rest
    static constexpr int kPairs = (kN - kShared) / 2;   // of tiles of eight columns
    // Of a thread's rows, those whose rest V's tile has room for at once
    static constexpr int kTileRows =
        kNeeded ? std::min(kNRows, Kernel_traits::kSmemKVSize / 2 / (kPairs * kNThreads * 16)) : kNRows;

    const Flash_fwd_params &params;
    const BlockInfo</*Varlen=*/true> binfo;

    __forceinline__ __device__ ChunkRest(const Flash_fwd_params &params)
        : params(params), binfo(params, kNeeded ? blockIdx.y : 0) {}

    // Sends for what fold left.
    __forceinline__ __device__ void fetch() const {
        if constexpr (kNeeded) {
            static_assert(kNRows % kTileRows == 0);
            __syncthreads();  // V's last tile is read
            fetch_rows(0);
        }
    }

    // Adds what was fetched to acc_o, if any was, and leaves the sum for the next chunk, unless this is the
    // last.
    template<bool Last, typename Tensor>
    __forceinline__ __device__ void fold(
        const bool any, const fork_fold::Weights (&weights)[kNRows], Tensor &acc_o) const {
        if constexpr (kNeeded) {
            #pragma unroll
            for (int mi = 0; mi < kNRows; ++mi) {
                if (mi % kTileRows == 0) {
                    if (mi > 0 && any) {
                        __syncwarp();  // nor does the copy from reading last
                        fetch_rows(mi);
                    }
                    FLASH_NAMESPACE::cp_async_wait<0>();
                    __syncwarp();  // the wait alone does not keep the compiler from reading first
                }
                float4 *const row = out_row(mi);
                #pragma unroll
                for (int pair = 0; pair < kPairs; ++pair) {
                    const int one = 4 * (mi / 2 + kM * (kShared + 2 * pair)) + mi % 2 * 2, two = one + 4 * kM;
                    if (any) {
                        const float4 run = v_tile()[(mi % kTileRows * kPairs + pair) * kNThreads];
                        acc_o(one) = fork_fold::fold_element(weights[mi], run.x, acc_o(one));
                        acc_o(one + 1) = fork_fold::fold_element(weights[mi], run.y, acc_o(one + 1));
                        acc_o(two) = fork_fold::fold_element(weights[mi], run.z, acc_o(two));
                        acc_o(two + 1) = fork_fold::fold_element(weights[mi], run.w, acc_o(two + 1));
                    }
                    if (!Last && row != nullptr) {
                        row[4 * pair] = make_float4(acc_o(one), acc_o(one + 1), acc_o(two), acc_o(two + 1));
                    }
                }
            }
        }
    }

private:
    // Each thread fetches what it left itself.
    __forceinline__ __device__ void fetch_rows(const int first) const {
        #pragma unroll
        for (int i = 0; i < kTileRows; ++i) {
            const float4 *const row = out_row(first + i);
            #pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
                if (row != nullptr) {
                    SM80_CP_ASYNC_CACHEGLOBAL<float4>::copy(
                        row[4 * pair], v_tile()[(i * kPairs + pair) * kNThreads]);
                }
            }
        }
        cute::cp_async_fence();
    }

    // This thread's part of V's tile.
    static __forceinline__ __device__ float4 *v_tile() {
        extern __shared__ char smem_[];
        return reinterpret_cast<float4 *>(smem_ + Kernel_traits::kSmemSize - Kernel_traits::kSmemKVSize / 2)
            + threadIdx.x;
    }

    // This thread's part of a row of the output; null past the sequence's end.
    __forceinline__ __device__ float4 *out_row(const int mi) const {
        const int row = blockIdx.x * Kernel_traits::kBlockM + mi / 2 * (16 * Kernel_traits::kNWarps)
            + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + mi % 2 * 8;
        if (row >= binfo.actual_seqlen_q) { return nullptr; }
        auto *out = reinterpret_cast<typename Kernel_traits::Element *>(params.o_ptr)
            + binfo.q_offset(params.o_batch_stride, params.o_row_stride, blockIdx.y)
            + int64_t(row) * params.o_row_stride + int64_t(blockIdx.z) * params.o_head_stride;
        return reinterpret_cast<float4 *>(out) + threadIdx.x % 4;
    }
};

}  // namespace FLASH_NAMESPACE

// Chunks of keys folded in the thread block that walks them: no accumulators in memory.

#pragma once

#include <cute/tensor.hpp>

#include "namespace_config.h"
#include "flash.h"
#include "fork_chunk_rest.h"
#include "fork_fold.h"
#include "fork_past_end.h"
#include "fork_walking.h"
#include "fork_occupancy.h"
#include "fork_runtime.h"
#include "utils.h"

namespace FLASH_NAMESPACE {

using namespace cute;

namespace fork_fold {

// NaN for rows of this block that need keys past the longest key length that the call named, and, by the
// thread block of the last row that it named, for rows past that; with the mode off, for rows that need keys
// past their cache. Found anew at the end, so that nothing of it takes a register before.
template<typename Element>
__forceinline__ __device__ void poison_rows(
    const Flash_fwd_params &params, const int bidb, const int bidh, const int m_block, const int kBlockM) {
    if (params.fork.n_blocks_per_split == 0 && !has_caches(params)) { return; }
    const BlockInfo</*Varlen=*/true> binfo(params, bidb);
    const bool all_keys = binfo.actual_seqlen_k <= named_keys(params, binfo);
    if (all_keys && binfo.actual_seqlen_q <= params.seqlen_q) { return; }
    __syncthreads();  // the rows may just have been written
    Element *out = reinterpret_cast<Element *>(params.o_ptr)
        + binfo.q_offset(params.o_batch_stride, params.o_row_stride, bidb)
        + int64_t(bidh) * params.o_head_stride;
    const int block_end = (m_block + 1) * kBlockM;
    const int end =
        block_end < params.seqlen_q ? std::min(block_end, binfo.actual_seqlen_q) : binfo.actual_seqlen_q;
    for (int row = m_block * kBlockM; row < end; ++row) {
        if (row < params.seqlen_q && !falls_short(params, binfo, visible_keys(params, binfo, row))) {
            continue;
        }
        for (int col = threadIdx.x; col < params.d; col += blockDim.x) {
            out[int64_t(row) * params.o_row_stride + col] = Element(NAN);
        }
        if (threadIdx.x == 0) { write_lse(params, binfo, bidb, bidh, row, NAN); }
    }
}

// What is left to do where a thread block has written its rows: NaN for such as those, and zeros for rows of
// no sequence.
template<typename Element>
__forceinline__ __device__ void end_rows(
    const Flash_fwd_params &params, const int bidb, const int bidh, const int m_block, const int kBlockM) {
    poison_rows<Element>(params, bidb, bidh, m_block, kBlockM);
    fork_past_end::clear_results(params, bidb, bidh, m_block, kBlockM, m_block == gridDim.x - 1);
}

}  // namespace fork_fold

// The running result of a thread block that walks several chunks. It lies in shared memory, behind what the
// kernel itself uses: each thread's accumulator for itself but for ChunkRest, each row's max and sum once.
template<typename Kernel_traits>
struct ChunkFold {
    static constexpr int kNThreads = Kernel_traits::kNThreads;
    // Tiles of 16 rows that a thread has
    static constexpr int kM = Kernel_traits::kBlockM / (16 * Kernel_traits::kNWarps);
    static constexpr int kNRows = 2 * kM;
    static constexpr int kN = Kernel_traits::kHeadDim / 8;
    using Rest = ChunkRest<Kernel_traits>;
    static constexpr int kAccBytes = kNThreads * kM * Rest::kShared * 16;
    static constexpr int kBytes = kAccBytes + kNThreads / 4 * kNRows * 8;

    const Flash_fwd_params &params;
    int n_blocks;  // of a chunk; 0: there are none
    bool any = false;

    __forceinline__ __device__ ChunkFold(const Flash_fwd_params &params, const bool walks)
        : params(params),
          n_blocks(walks ? params.fork.n_blocks_per_split
                      * (fork_keys::tile(Kernel_traits::kHeadDim) / Kernel_traits::kBlockN)
                         : 0) {}

    // The block at which to stop and fold, from where a chunk may have been begun.
    __forceinline__ __device__ int first_block(const int n_block, const int n_block_min) const {
        return n_blocks == 0 ? n_block_min : std::max(n_block_min, n_block / n_blocks * n_blocks);
    }

    // Whether a chunk begins above the block to visit next.
    __forceinline__ __device__ bool begins_between(
        const int n_block, const int next, const int n_block_min) const {
        return n_blocks != 0 && next >= n_block_min && n_block / n_blocks != next / n_blocks;
    }

    // Folds the chunk that ended above n_block; the registers begin the next.
    template<typename Softmax, typename Tensor>
    __forceinline__ __device__ void fold_chunk(Softmax &softmax, Tensor &acc_o, const float scale_log2) {
        fold</*Last=*/false>(softmax, acc_o, scale_log2);
        any = true;
        cute::fill(softmax.row_max, -INFINITY);
        cute::clear(softmax.row_sum);
        cute::clear(acc_o);
    }

    template<typename Softmax, typename Tensor>
    __forceinline__ __device__ bool fold_chunk_if(
        const bool more, Softmax &softmax, Tensor &acc_o, const float scale_log2) {
        if (n_blocks == 0 || !more) { return false; }
        fold_chunk(softmax, acc_o, scale_log2);
        return true;
    }

    // What is left in the registers is the last chunk: leaves the rows there.
    template<typename Softmax, typename Tensor>
    __forceinline__ __device__ auto finish(
        Softmax &softmax, Tensor &acc_o, const float scale, const float scale_log2) {
        static_assert(!kWalks<Kernel_traits>
            || Kernel_traits::kSmemSize + kBytes
                == fork_occupancy::standard_smem(Kernel_traits::kHeadDim, /*walks=*/true));
        fold</*Last=*/true>(softmax, acc_o, scale_log2);
        auto lse = make_fragment_like(softmax.row_sum);
        auto rowcol = make_tensor(acc_o.data(), FLASH_NAMESPACE::convert_layout_acc_rowcol(acc_o.layout()));
        #pragma unroll
        for (int mi = 0; mi < kNRows; ++mi) {
            lse(mi) = fork_fold::log_sum_exp(softmax.row_max(mi), softmax.row_sum(mi), scale);
            const float inverse = fork_fold::inverse_sum(softmax.row_sum(mi));
            #pragma unroll
            for (int ni = 0; ni < size<1>(rowcol); ++ni) {
                rowcol(mi, ni) = __fmul_rn(rowcol(mi, ni), inverse);
            }
        }
        return lse;
    }

    // This thread's accumulators, and its rows' max and sum.
    static __forceinline__ __device__ float4 *shared_acc() {
        extern __shared__ char smem_[];
        return reinterpret_cast<float4 *>(smem_ + Kernel_traits::kSmemSize) + threadIdx.x;
    }

    static __forceinline__ __device__ float2 *shared_rows() {
        extern __shared__ char smem_[];
        return reinterpret_cast<float2 *>(smem_ + Kernel_traits::kSmemSize + kAccBytes)
            + threadIdx.x / 4 * kNRows;
    }

private:
    template<bool Last, typename Softmax, typename Tensor>
    __forceinline__ __device__ void fold(Softmax &softmax, Tensor &acc_o, const float scale_log2) {
        static_assert(decltype(size(acc_o))::value == 4 * kM * kN);
        float4 *const acc = shared_acc();
        float2 *const rows = shared_rows();
        const Rest rest(params);
        if (any) { rest.fetch(); }
        fork_fold::sum_row(softmax);
        fork_fold::Weights weights[kNRows];
        float2 state[kNRows];
        #pragma unroll
        for (int mi = 0; mi < kNRows; ++mi) {
            state[mi] = any ? rows[mi] : make_float2(-INFINITY, 0.f);
            weights[mi] = fork_fold::fold_row(
                state[mi].x, state[mi].y, softmax.row_max(mi), softmax.row_sum(mi), scale_log2);
        }
        if (any) {
            #pragma unroll
            for (int i = 0; i < kM * Rest::kShared; ++i) {
                // acc_o is ((2, 2), M, N): two elements of one row, then two of the row eight below.
                const float4 run = acc[i * kNThreads];
                const int mi = i % kM * 2;
                acc_o(4 * i) = fork_fold::fold_element(weights[mi], run.x, acc_o(4 * i));
                acc_o(4 * i + 1) = fork_fold::fold_element(weights[mi], run.y, acc_o(4 * i + 1));
                acc_o(4 * i + 2) = fork_fold::fold_element(weights[mi + 1], run.z, acc_o(4 * i + 2));
                acc_o(4 * i + 3) = fork_fold::fold_element(weights[mi + 1], run.w, acc_o(4 * i + 3));
            }
        }
        __syncwarp();  // rows is read by four threads
        #pragma unroll
        for (int mi = 0; mi < kNRows; ++mi) {
            if (Last) {
                softmax.row_max(mi) = state[mi].x;
                softmax.row_sum(mi) = state[mi].y;
            } else if (threadIdx.x % 4 == 0) {
                rows[mi] = state[mi];
            }
        }
        if (!Last) {
            #pragma unroll
            for (int i = 0; i < kM * Rest::kShared; ++i) {
                acc[i * kNThreads] =
                    make_float4(acc_o(4 * i), acc_o(4 * i + 1), acc_o(4 * i + 2), acc_o(4 * i + 3));
            }
        }
        rest.template fold<Last>(any, weights, acc_o);
    }
};

// Heads upstream's loop over blocks of keys, from n_block down to n_block_min. Where a thread block walks
// several chunks, an outer loop folds each at its end; the inner one has nothing new in it. Where it does
// not, `walks` is a constant that leaves upstream's loop. `first` says whether to enter at all. The other
// names are those of upstream's kernels and their ChunkFold.
#define FORK_EACH_BLOCK(walks, first) \
    for (bool again = (first); again; again = (walks) \
            && chunks.fold_chunk_if(n_block >= n_block_min, softmax, acc_o, params.scale_softmax_log2)) \
        for (const int chunk_min = (walks) ? chunks.first_block(n_block, n_block_min) : n_block_min; \
            n_block >= chunk_min; --n_block)

// Of a kernel that walks several chunks, beyond Kernel_traits::kSmemSize.
template<typename Kernel_traits>
constexpr int kChunkFoldBytes = ChunkFold<Kernel_traits>::kBytes;

// What a launch of such a kernel may ask for, the same in every call: the limit is the function's, so one
// that a call within one chunk lowered would fail another thread's launch of several.
template<typename Kernel_traits>
int shared_memory_limit() {
    constexpr int walking = Kernel_traits::kSmemSize + kChunkFoldBytes<Kernel_traits>;
    static_assert(walking == fork_occupancy::split_smem(Kernel_traits::kHeadDim));
    return walking <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) ? walking
                                                                                : Kernel_traits::kSmemSize;
}

}  // namespace FLASH_NAMESPACE

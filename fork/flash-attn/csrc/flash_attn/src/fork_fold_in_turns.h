// How a thread block folds its chunk when its turn has come; fork_split.h says which calls do.

#pragma once

#include <cute/tensor.hpp>

#include "namespace_config.h"
#include "flash.h"
#include "fork_chunks.h"
#include "fork_fold.h"
#include "fork_turn.h"

namespace FLASH_NAMESPACE {
namespace fork_in_turns {

// The split kernel is compiled once more with these, for thread blocks of 128 rows that walk two chunks
// before their turn: they hold the first in shared memory, and fold both at once.
template<typename Kernel_traits>
struct InPairs : Kernel_traits {};

template<typename Kernel_traits>
constexpr int kWalked = 1;
template<typename Kernel_traits>
constexpr int kWalked<InPairs<Kernel_traits>> = walked(kTallRows);

// Gives a thread block its place by ticket: chunks from the last to the first, and of each all blocks of
// rows.
__forceinline__ __device__ void take_place(const Flash_fwd_params &params, const int num_m_block,
    int &n_split_idx, int &m_block, int &bidb, int &bidh) {
    const int columns = num_m_block * params.fork.slice.h, num_blocks = columns * params.fork.slice.b;
    const int ticket = fork_turn::take_ticket(params.fork.turns.ticket);
    const int row_block = ticket % num_blocks;
    n_split_idx = params.num_splits - 1 - ticket / num_blocks;
    m_block = row_block % num_m_block;
    bidh = row_block % columns / num_m_block;
    bidb = row_block / columns;
}

// The chunks, or pairs of them, that thread blocks walk for a block of rows: those whose thread blocks
// compute_attn_1rowblock_splitkv does not end at once, by the same bounds. One too many here, and others
// would wait for it for ever.
struct Chunks {
    int first, last;
};
template<typename Kernel_traits, bool Is_causal, bool Is_local, typename BlockInfo, typename Group>
__forceinline__ __device__ Chunks chunks_of(
    const Flash_fwd_params &params, const BlockInfo &binfo, const Group &group, const int m_block) {
    constexpr int kBlockM = Kernel_traits::kBlockM, kBlockN = Kernel_traits::kBlockN;
    const int diagonal = binfo.actual_seqlen_k - binfo.actual_seqlen_q;
    int end = std::min(binfo.readable_keys(params), params.seqlen_k);
    if (Is_causal || Is_local) {
        end =
            std::min(end, group.query((m_block + 1) * kBlockM - 1) + 1 + diagonal + params.window_size_right);
    }
    const int begin =
        Is_local ? std::max(0, group.query(m_block * kBlockM) + diagonal - params.window_size_left) : 0;
    const int keys = kWalked<Kernel_traits> * params.fork.n_blocks_per_split * kBlockN;
    return {begin / keys, (end - 1) / keys};
}

// Folds this thread block's chunk into its rows' running result, and says whether it is the last: then the
// result is in the registers. Of a pair, `held` holds the chunk of later keys, if there is one.
template<typename Kernel_traits, bool Is_causal, bool Is_local, typename BlockInfo, typename Group,
    typename Softmax, typename Tensor>
__forceinline__ __device__ bool fold(const Flash_fwd_params &params, const BlockInfo &binfo,
    const Group &group, const int bidb, const int bidh, const int m_block, const int chunk,
    const ChunkFold<Kernel_traits> &held, Softmax &softmax, Tensor &acc_o) {
    constexpr int kBlockM = Kernel_traits::kBlockM, kNThreads = Kernel_traits::kNThreads;
    constexpr int kAcc = decltype(cute::size(acc_o))::value;
    static_assert(kAcc * kNThreads == kBlockM * Kernel_traits::kHeadDim);
    constexpr int kM = kBlockM / (16 * Kernel_traits::kNWarps);  // tiles of 16 rows that a thread has
    const int num_m_block = (params.fork.slice.rows + kBlockM - 1) / kBlockM;
    const int row_block = (bidb * params.fork.slice.h + bidh) * num_m_block + m_block;
    const Chunks chunks = chunks_of<Kernel_traits, Is_causal, Is_local>(params, binfo, group, m_block);
    const bool is_first = chunk == chunks.last, is_last = chunk == chunks.first;
    float4 *const acc = params.fork.turns.acc + int64_t(row_block) * (kAcc / 4 * kNThreads) + threadIdx.x;
    // Four threads have a row.
    float2 *const states = params.fork.turns.states + row_block * kBlockM + threadIdx.x / 4 * (2 * kM);
    int *const turn = params.fork.turns.turn + row_block;
    if (!is_first) {
        if (threadIdx.x == 0) {
            fork_turn::await(turn, chunks.last - chunk, params.fork.turns.given_up(), params.fork.wait_limit);
        }
        __syncthreads();
    }
    const bool two = kWalked<Kernel_traits> > 1 && held.any;
    if (!is_first || two) {
        fork_fold::Weights weights[2 * kM], held_weights[2 * kM];
        #pragma unroll
        for (int mi = 0; mi < 2 * kM; ++mi) {
            float2 state = is_first ? make_float2(-INFINITY, 0.f) : __ldcg(states + mi);
            if (two) {
                const float2 part = held.shared_rows()[mi];
                held_weights[mi] =
                    fork_fold::fold_row(state.x, state.y, part.x, part.y, params.scale_softmax_log2);
            }
            weights[mi] = fork_fold::fold_row(
                state.x, state.y, softmax.row_max(mi), softmax.row_sum(mi), params.scale_softmax_log2);
            softmax.row_max(mi) = state.x;
            softmax.row_sum(mi) = state.y;
        }
        #pragma unroll
        for (int i = 0; i < kAcc / 4; ++i) {
            // acc_o is ((2, 2), M, N): two elements of one row, then two of the row eight below.
            float4 run = is_first ? make_float4(0.f, 0.f, 0.f, 0.f) : __ldcg(acc + i * kNThreads);
            const int mi = i % kM * 2;
            if (two) {
                const float4 part = held.shared_acc()[i * kNThreads];
                run.x = fork_fold::fold_element(held_weights[mi], run.x, part.x);
                run.y = fork_fold::fold_element(held_weights[mi], run.y, part.y);
                run.z = fork_fold::fold_element(held_weights[mi + 1], run.z, part.z);
                run.w = fork_fold::fold_element(held_weights[mi + 1], run.w, part.w);
            }
            acc_o(4 * i) = fork_fold::fold_element(weights[mi], run.x, acc_o(4 * i));
            acc_o(4 * i + 1) = fork_fold::fold_element(weights[mi], run.y, acc_o(4 * i + 1));
            acc_o(4 * i + 2) = fork_fold::fold_element(weights[mi + 1], run.z, acc_o(4 * i + 2));
            acc_o(4 * i + 3) = fork_fold::fold_element(weights[mi + 1], run.w, acc_o(4 * i + 3));
        }
    }
    if (is_last) { return true; }
    __syncwarp();  // states are read by four threads
    if (threadIdx.x % 4 == 0) {
        #pragma unroll
        for (int mi = 0; mi < 2 * kM; ++mi) {
            __stcg(states + mi, make_float2(softmax.row_max(mi), softmax.row_sum(mi)));
        }
    }
    #pragma unroll
    for (int i = 0; i < kAcc / 4; ++i) {
        __stcg(acc + i * kNThreads,
            make_float4(acc_o(4 * i), acc_o(4 * i + 1), acc_o(4 * i + 2), acc_o(4 * i + 3)));
    }
    __syncthreads();
    if (threadIdx.x == 0) { fork_turn::pass_on(turn, chunks.last - chunk); }
    return false;
}

}  // namespace fork_in_turns
}  // namespace FLASH_NAMESPACE

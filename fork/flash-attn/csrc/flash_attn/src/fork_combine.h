// Folds the partial results of chunks that thread blocks of their own computed into rows of the output.
//
// A row reads only the chunks in which it may see a key, found from its own sequence, and takes them from the
// last to the first. So neither the number of chunks in the launch, nor the other rows, nor what lies in
// accumulators that nothing wrote can reach its bits. One warp a row, or where there are few rows one for
// each 32 columns, which loads chunks ahead; any number of chunks, many of them in flight. Chunks that folded
// in turns (fork_in_turns.h) are one.

#pragma once

#include "namespace_config.h"
#include "block_info.h"
#include "flash.h"
#include "fork_fold.h"
#include "fork_group.h"
#include "fork_past_end.h"
#include "fork_runtime.h"
#include "fork_sink_join.h"
#include "fork_turn.h"
#include "utils.h"

namespace FLASH_NAMESPACE {

// The warps of a thread block, of which so many share a row's columns.
constexpr int fork_combine_warps(const int per_row) { return 4 % per_row == 0 ? 4 : per_row; }

// The largest score of a row's chunks so far.
struct ForkCombineMax {
    float max = NAN;    // fmaxf leaves it out
    bool empty = true;  // no chunk with a key that the row sees

    // Takes the chunks of a warp, one a lane, in the order of lanes, and returns what the lane's is folded
    // with: what fold_row returns to one who folds them one by one. For the largest score comes out the same
    // in whatever order it is found.
    __forceinline__ __device__ fork_fold::Weights fold(
        const float part_max, const float part_sum, const float scale_log2) {
        constexpr uint32_t kAll = 0xffffffff;
        const int lane = threadIdx.x % 32;
        const uint32_t filled = __ballot_sync(kAll, !(part_max == -INFINITY && part_sum == 0.f));
        float up_to = filled >> lane & 1 ? part_max : NAN;  // this lane's, those before included
        #pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float other = __shfl_up_sync(kAll, up_to, distance);
            if (lane >= distance) { up_to = fmaxf(up_to, other); }
        }
        const float before = __shfl_up_sync(kAll, up_to, 1);
        const bool first = empty && (filled & ((1u << lane) - 1)) == 0;
        float run_max = first ? -INFINITY : lane == 0 ? max : fmaxf(max, before);
        float run_sum = first ? 0.f : 1.f;  // any but 0 says that there is a chunk before
        max = fmaxf(max, __shfl_sync(kAll, up_to, 31));
        empty = empty && filled == 0;
        return fork_fold::fold_row(run_max, run_sum, part_max, part_sum, scale_log2);
    }
};

// By Kernel_traits, as upstream's kernels: its Element is half_t in every host pass, so a kernel named by
// Element would be launched for the other dtype where both are linked.
// kFolded: chunks folded in turns. The message of a wait given up would take registers from other calls.
template<typename Kernel_traits, int kPerRow, bool kAhead, bool kFolded>
__global__ void __launch_bounds__(fork_combine_warps(kPerRow) * 32)
    fork_combine_kernel(__grid_constant__ const Flash_fwd_params params, const int split_size) {
    using Element = typename Kernel_traits::Element;
    using index_t = Flash_fwd_params::index_t;
    constexpr int kColumns = Kernel_traits::kHeadDim / kPerRow;  // of a warp
    // Floats a lane loads at once
    constexpr int kVec = kColumns % 128 == 0 ? 4 : (kColumns % 64 == 0 ? 2 : 1);
    constexpr int kIters = kColumns / (32 * kVec);
    // Chunks in flight, in 64 registers
    constexpr int kGroup = kVec * kIters <= 2 ? 32 : (kVec * kIters <= 4 ? 16 : 8);
    using Load = cutlass::AlignedArray<float, kVec>;
    struct Group {
        float max, sum;             // of one chunk, the lane's
        Load part[kGroup][kIters];  // the lane's columns of all
    };

    if constexpr (kFolded) {
        if (blockIdx.x == 0 && threadIdx.x == 0) { fork_turn::end_if_given_up(params.fork.turns.given_up()); }
    }
    const int lane = threadIdx.x % 32;
    const index_t warp = index_t(blockIdx.x) * fork_combine_warps(kPerRow) + threadIdx.x / 32;
    const int first_col = warp % kPerRow * kColumns;
    const index_t flat_row = warp / kPerRow;
    const fork_slices::Slice &slice = params.fork.slice;
    const index_t num_rows = fork_slices::num_rows(slice);
    if (flat_row >= num_rows) { return; }
    const int row = slice.first_row + flat_row % slice.rows;
    const int bidh = slice.first_h + flat_row / slice.rows % slice.h;
    const int bidb = slice.first_b + flat_row / slice.rows / slice.h;

    const BlockInfo</*Varlen=*/true> binfo(params, bidb);
    const fork_group::Group<true> heads(params);
    const int query = heads.query(row), head = heads.head(bidh, row);
    // The last of a row's slices has its first chunk.
    const bool takes_carried = slice.first_split + slice.splits < params.num_splits;
    const bool leaves_carried = slice.first_split > 0;
    const auto out_of = [&](const int out_query) {
        return reinterpret_cast<Element *>(params.o_ptr)
            + binfo.q_offset(params.o_batch_stride, params.o_row_stride, bidb)
            + index_t(out_query) * params.o_row_stride + index_t(head) * params.o_head_stride;
    };
    const auto fill = [&](const int out_query, const float value) {
        Element *const out = out_of(out_query);
        for (int col = first_col + lane; col < std::min(first_col + kColumns, params.d); col += 32) {
            out[col] = Element(value);
        }
        if (lane == 0 && first_col == 0) {
            fork_fold::write_lse(params, binfo, bidb, head, out_query, value);
        }
    };
    const auto clear_past_end = [&] {
        if (leaves_carried || !fork_past_end::may_have(params, bidb)) { return; }
        const fork_past_end::Rows rows = fork_past_end::of_block(binfo.sum_s_q, binfo.actual_seqlen_q,
            params.fork.packed_rows, query, 1, query == params.seqlen_q - 1);
        for (int past = rows.begin; past < rows.end; ++past) { fill(past, 0.f); }
    };
    if (query >= binfo.actual_seqlen_q) { return clear_past_end(); }

    // The chunks in which the row may see a key.
    const fork_fold::Keys keys = fork_fold::visible_keys(params, binfo, query);
    const bool short_launch = fork_fold::falls_short(params, binfo, keys);
    const bool any_key = keys.begin < keys.end && !short_launch;
    const int chunk_begin = any_key && !kFolded ? std::max(keys.begin / split_size, slice.first_split) : 0;
    const int chunk_end = !any_key ? 0
        : kFolded                  ? 1
                  : std::min((keys.end - 1) / split_size + 1, slice.first_split + slice.splits);

    const index_t first = flat_row - slice.first_split * num_rows;  // of the row's first chunk
    const float *max_ptr = reinterpret_cast<float *>(params.softmax_lseaccum_ptr) + first;
    const float *sum_ptr = max_ptr + fork_in_turns::kept(params) * num_rows;
    const float *o_ptr = reinterpret_cast<float *>(params.oaccum_ptr) + first * params.d_rounded;
    float2 *const carried_state = params.fork.carried.states + flat_row;
    float *const carried_acc = params.fork.carried.acc + flat_row * params.d_rounded;

    ForkCombineMax so_far;
    float sum = 0.f;
    Load acc[kIters];
    #pragma unroll
    for (int it = 0; it < kIters; ++it) {
        #pragma unroll
        for (int v = 0; v < kVec; ++v) { acc[it][v] = 0.f; }
    }
    if (takes_carried) {
        so_far.empty = carried_state->x == -INFINITY && carried_state->y == 0.f;
        if (!so_far.empty) { so_far.max = carried_state->x; }
        sum = carried_state->y;
        #pragma unroll
        for (int it = 0; it < kIters; ++it) {
            const int col = first_col + (it * 32 + lane) * kVec;
            if (col < params.d) { acc[it] = *reinterpret_cast<const Load *>(carried_acc + col); }
        }
    }
    const auto load = [&](const int last, Group &group) {
        const bool has_chunk = lane < kGroup && last - lane >= chunk_begin;
        group.max = has_chunk ? max_ptr[(last - lane) * num_rows] : -INFINITY;
        group.sum = has_chunk ? sum_ptr[(last - lane) * num_rows] : 0.f;
        #pragma unroll
        for (int u = 0; u < kGroup; ++u) {
            #pragma unroll
            for (int it = 0; it < kIters; ++it) {
                const int col = first_col + (it * 32 + lane) * kVec;
                if (last - u >= chunk_begin && col < params.d) {
                    group.part[u][it] = *reinterpret_cast<const Load *>(
                        o_ptr + (last - u) * num_rows * params.d_rounded + col);
                } else {
                    #pragma unroll
                    for (int v = 0; v < kVec; ++v) { group.part[u][it][v] = 0.f; }
                }
            }
        }
    };
    Group group, next;
    if (kAhead) { load(chunk_end - 1, group); }
    for (int last = chunk_end - 1; last >= chunk_begin; last -= kGroup) {
        if (kAhead) {
            if (last - kGroup >= chunk_begin) { load(last - kGroup, next); }
        } else {
            load(last, group);
        }
        const fork_fold::Weights own = so_far.fold(group.max, group.sum, params.scale_softmax_log2);
        #pragma unroll
        for (int u = 0; u < kGroup; ++u) {
            if (u % 8 == 0 && last - u < chunk_begin) { break; }
            const fork_fold::Weights weights{
                __shfl_sync(0xffffffff, own.run, u), __shfl_sync(0xffffffff, own.part, u)};
            // In fold_row's words
            sum = fork_fold::fold_element(weights, sum, __shfl_sync(0xffffffff, group.sum, u));
            #pragma unroll
            for (int it = 0; it < kIters; ++it) {
                #pragma unroll
                for (int v = 0; v < kVec; ++v) {
                    acc[it][v] = fork_fold::fold_element(weights, acc[it][v], group.part[u][it][v]);
                }
            }
        }
        if (kAhead) { group = next; }
    }
    if (leaves_carried) {
        __syncthreads();  // no warp of the row takes what another has left
        #pragma unroll
        for (int it = 0; it < kIters; ++it) {
            const int col = first_col + (it * 32 + lane) * kVec;
            if (col < params.d) { *reinterpret_cast<Load *>(carried_acc + col) = acc[it]; }
        }
        if (lane == 0 && first_col == 0) {
            *carried_state = so_far.empty ? make_float2(-INFINITY, 0.f) : make_float2(so_far.max, sum);
        }
        return;
    }
    const float lse = fork_fold::log_sum_exp(so_far.max, sum, params.scale_softmax);
    const float inverse = fork_fold::inverse_sum(sum);
    const float share = fork_sink::share(params, head, query, lse);

    Element *const out = out_of(query);
    #pragma unroll
    for (int it = 0; it < kIters; ++it) {
        const int col = first_col + (it * 32 + lane) * kVec;
        if (col < params.d) {
            cutlass::AlignedArray<Element, kVec> packed;
            #pragma unroll
            for (int v = 0; v < kVec; ++v) {
                packed[v] = Element(short_launch ? NAN : __fmul_rn(__fmul_rn(acc[it][v], inverse), share));
            }
            *reinterpret_cast<cutlass::AlignedArray<Element, kVec> *>(out + col) = packed;
        }
    }
    if (lane == 0 && first_col == 0) {
        fork_fold::write_lse(params, binfo, bidb, head, query, short_launch ? NAN : lse);
    }
    if (query == params.seqlen_q - 1) {
        // Rows past the call's longest query length have no accumulators.
        for (int rest = query + 1; rest < binfo.actual_seqlen_q; ++rest) { fill(rest, NAN); }
        clear_past_end();
    }
}

template<typename Kernel_traits>
void run_fork_combine(const Flash_fwd_params &params, cudaStream_t stream) {
    const int64_t num_rows = fork_slices::num_rows(params.fork.slice);
    const int split_size = params.fork.n_blocks_per_split * Kernel_traits::kBlockN;
    const auto run = [&](auto kernel, const int per_row) {
        const int warps = fork_combine_warps(per_row);
        kernel<<<dim3((num_rows * per_row + warps - 1) / warps), warps * 32, 0, stream>>>(params, split_size);
    };
    // Fewer than eight warps a multiprocessor leave memory waiting. With few chunks nothing is gained: 1 us
    // more for 16 (H100).
    constexpr int kParts = Kernel_traits::kHeadDim / 32;
    if (params.fork.turns.any()) {
        run(&fork_combine_kernel<Kernel_traits, 1, false, true>, 1);
    } else if (params.fork.slice.splits >= 64
        && num_rows < 8 * device_attribute(cudaDevAttrMultiProcessorCount)) {
        run(&fork_combine_kernel<Kernel_traits, kParts, true, false>, kParts);
    } else {
        run(&fork_combine_kernel<Kernel_traits, 1, false, false>, 1);
    }
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace FLASH_NAMESPACE

// Decoding: calls whose thread blocks have up to 16 rows.
//
// The split kernels give each warp 16 of 64 rows. With a row or a few, one warp multiplies all keys while
// three multiply rows that are not there, and waits for each step to end before it begins the next. Here
// warps have roles. Some copy tiles of keys and values. Some multiply queries with a tile's keys and take the
// exponentials; each has all rows and a quarter of the keys. Some multiply the probabilities of the tile
// before with its values; each has all rows and a quarter of the columns.
//
// Bits are those of the split kernels where scores are finite. An element of a product is summed in the same
// order whichever warp has it. The largest score does not depend on the order. Exponentials are summed as
// there: four threads have a row, each the same quarter of its keys, from a step's first to its last.

#pragma once

#include <algorithm>

#include <cute/tensor.hpp>

#include "namespace_config.h"
#include "block_info.h"
#include "flash.h"
#include "fork_append.h"
#include "fork_chunks.h"
#include "fork_combine.h"
#include "fork_fold.h"
#include "fork_group.h"
#include "fork_mode.h"
#include "fork_narrow_roles.h"
#include "fork_runtime.h"
#include "fork_slices.h"

namespace FLASH_NAMESPACE {
namespace fork_narrow {

// Of a call whose chunks spread. Sequences may be shorter than a call allows for, as in captured graphs, and
// thread blocks take half a microsecond to find that out, one after another. So no more are launched, and
// each goes on to other chunks. With fewer, the last would have too much left to do.
inline int most_blocks() { return 8 * device_attribute(cudaDevAttrMultiProcessorCount); }

// As many slots as fit the GPU, or so many. Fewer than the fewest, and none of these kernels does: above head
// dim 64 where a thread block has 99 KiB.
template<typename Kernel_traits>
int slots(const int most = Shared<Kernel_traits>::kMost) {
    using S = Shared<Kernel_traits>;
    const int room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    int slots = std::min(most, S::kMost);
    while (slots >= S::kFewest && S::size(slots) > room) { --slots; }
    return slots;
}

// Slopes, masks and biases are not built in, nor is folding in turns, which calls of full tiles do. Many
// thread blocks of one tile each take longer than those of the split kernels, for a multiprocessor has room
// for more of these.
template<typename Kernel_traits>
bool fits(const Flash_fwd_params &params) {
    // With the mode off: calls on a cache in pages, up to head dim 64, where a tile is one step of the
    // softmax, as in the split kernels. Other calls would gain little or nothing. The first step is scaled
    // like any other here, so scores may not be turned around.
    const bool serves = params.fork.n_blocks_per_split > 0
        || (params.block_table != nullptr && Kernel_traits::kHeadDim <= 64 && params.cu_seqlens_q == nullptr
            && params.scale_softmax > 0.f);
    return serves && params.seqlen_q > 0 && params.seqlen_q * params.fork.group <= kRows
        && (params.seqlen_k > Kernel_traits::kBlockN
            || params.b * params.h <= device_attribute(cudaDevAttrMultiProcessorCount))
        && params.alibi_slopes_ptr == nullptr && !params.fork.scores.any() && !params.fork.turns.any()
        && slots<Kernel_traits>() >= Shared<Kernel_traits>::kFewest
        && !(fork_mode::test_paths() & fork_mode::kWide);
}

// Rows that see no key
template<typename Info>
__forceinline__ __device__ void leave_empty(
    const Flash_fwd_params &params, const Info &binfo, const Work &work) {
    auto *const out = static_cast<uint16_t *>(params.o_ptr)  // of either dtype
        + binfo.q_offset(params.o_batch_stride, params.o_row_stride, work.bidb)
        + work.bidh * params.o_head_stride;
    for (int i = threadIdx.x; i < work.rows * params.d; i += kThreads) {
        out[int64_t(i / params.d) * params.o_row_stride + i % params.d] = 0;
    }
    if (threadIdx.x < work.rows) {
        fork_fold::write_lse(params, binfo, work.bidb, work.bidh, threadIdx.x, INFINITY);
    }
}

// A partial result of no key, which upstream's kernel that combines reads
template<typename Info>
__forceinline__ __device__ void leave_nothing(
    const Flash_fwd_params &params, const Info &binfo, const Work &work) {
    const int64_t flat = fork_slices::row_at(params.fork.slice, work.n_split_idx, work.bidb, work.bidh, 0);
    auto *const out = static_cast<float *>(params.oaccum_ptr) + flat * params.d_rounded;
    for (int i = threadIdx.x; i < work.rows * params.d_rounded; i += kThreads) { out[i] = 0.f; }
    if (threadIdx.x < work.rows) {
        static_cast<float *>(params.softmax_lseaccum_ptr)[flat + threadIdx.x] =
            fork_fold::or_short(params, binfo, threadIdx.x, -INFINITY);
    }
}

// For fork_append::append, which all threads call.
template<typename Kernel_traits>
struct AllThreads : Kernel_traits {
    static constexpr int kNThreads = kThreads;
};

// Returns: whether there may be something to do behind this chunk. With the mode off every split is written.
template<typename Kernel_traits, bool Is_causal, bool Is_even_K>
__forceinline__ __device__ bool take_chunk(const Flash_fwd_params &params, const int bidb, const int bidh,
    const int n_split_idx, const int slots, Shared<Kernel_traits> &shared) {
    constexpr int kBlockN = Kernel_traits::kBlockN;
    const BlockInfo</*Varlen=*/true> binfo(params, bidb);
    const fork_group::Group<true> group(params);
    Work work;
    work.bidb = bidb;
    work.bidh = bidh;
    work.n_split_idx = n_split_idx;
    work.rows = group.rows(std::min(binfo.actual_seqlen_q, params.seqlen_q));
    if (work.rows <= 0) {
        if (params.num_splits <= 1) { fork_past_end::clear_results(params, bidb, bidh, 0, kRows, true); }
        return false;
    }

    // As compute_attn_1rowblock_splitkv
    const bool is_local = !Is_causal && (params.window_size_left >= 0 || params.window_size_right >= 0);
    const int diagonal = binfo.actual_seqlen_k - binfo.actual_seqlen_q;
    work.by_row = Is_causal || is_local;
    work.walks_all = params.num_splits <= 1;
    work.is_off = Kernel_traits::kHeadDim <= 64 && params.fork.n_blocks_per_split == 0;
    work.chunk = work.is_off ? ceil_div(ceil_div(params.seqlen_k, kBlockN), std::max(1, params.num_splits))
                             : params.fork.n_blocks_per_split;
    const int begin = n_split_idx * work.chunk;
    int end = ceil_div(binfo.readable_keys(params), kBlockN);
    if (!work.walks_all && !work.is_off) { end = std::min(end, ceil_div(params.seqlen_k, kBlockN)); }
    if (Is_causal || is_local) {
        end = std::min(
            end, ceil_div(group.query(work.rows - 1) + 1 + diagonal + params.window_size_right, kBlockN));
    }
    const bool has_next = !work.walks_all && (work.is_off || begin + work.chunk < end);
    if (!work.walks_all || work.is_off) { end = std::min(end, begin + work.chunk); }
    work.first = is_local ? std::max(begin, (diagonal - params.window_size_left) / kBlockN) : begin;
    work.last = end - 1;
    if (work.last >= work.first) {
        if (params.knew_ptr != nullptr) {
            fork_append::append<AllThreads<Kernel_traits>>(
                params, binfo, is_local, bidb, bidh, 0, begin, work.first, end);
        }
        if (threadIdx.x < kCopyThreads) {
            copy_tiles<Kernel_traits, Is_even_K>(params, binfo, work, slots, shared);
        } else {
            load_queries<Kernel_traits, Is_even_K>(params, binfo, group, work, shared);
            if (threadIdx.x < kCopyThreads + kRoleThreads) {
                multiply_keys(params, binfo, group, work, slots, shared);
            } else {
                multiply_values<Kernel_traits, Is_even_K>(params, binfo, work, slots, shared);
            }
        }
    } else if (work.walks_all) {
        leave_empty(params, binfo, work);
    } else if (work.is_off) {
        leave_nothing(params, binfo, work);
    }
    if (work.walks_all) {
        fork_fold::poison_rows<typename Kernel_traits::Element>(params, bidb, bidh, 0, kRows);
        fork_past_end::clear_results(params, bidb, bidh, 0, kRows, /*is_last_block=*/true);
    }
    return has_next;
}

// kBlocks: of a multiprocessor. Where it has two, threads have fewer registers, and less is under way at
// once.
template<typename Kernel_traits, bool Is_causal, bool Is_even_K, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    fork_narrow_kernel(__grid_constant__ const Flash_fwd_params params, const int slots) {
    extern __shared__ char smem_[];
    auto &shared = *reinterpret_cast<Shared<Kernel_traits> *>(smem_);

    const fork_slices::Slice &slice = params.fork.slice;
    for (int n_split_idx = slice.first_split + blockIdx.z;;) {
        int bidh = blockIdx.x, bidb = blockIdx.y;
        // So that registers do not keep for the next chunk what follows from them
        asm volatile("" : "+r"(bidh), "+r"(bidb));
        if (!take_chunk<Kernel_traits, Is_causal, Is_even_K>(
                params, slice.first_b + bidb, slice.first_h + bidh, n_split_idx, slots, shared)) {
            return;
        }
        n_split_idx += gridDim.z;
        if (n_split_idx >= slice.first_split + slice.splits) { return; }
        __syncthreads();
    }
}

template<typename Kernel_traits, bool Is_causal>
void run(Flash_fwd_params &params, cudaStream_t stream) {
    const bool even = params.d == Kernel_traits::kHeadDim;
    auto kernel = even ? &fork_narrow_kernel<Kernel_traits, Is_causal, true, 1>
                       : &fork_narrow_kernel<Kernel_traits, Is_causal, false, 1>;
    int num_slots = slots<Kernel_traits>();
    // The same limit in every call, for it is the function's.
    const int limit = Shared<Kernel_traits>::size(num_slots);
    if constexpr (Kernel_traits::kHeadDim <= 64) {
        // A few tiles leave little to send for ahead. Rather, two thread blocks share a multiprocessor, at
        // head dim 64 where one may have 227 KiB.
        if (params.num_splits <= 1 && params.seqlen_k <= 4 * Kernel_traits::kBlockN) {
            kernel = even ? &fork_narrow_kernel<Kernel_traits, Is_causal, true, 2>
                          : &fork_narrow_kernel<Kernel_traits, Is_causal, false, 2>;
            num_slots = slots<Kernel_traits>(3);
        }
    }
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
    const auto launch = [&](const dim3 grid) {
        kernel<<<grid, kThreads, Shared<Kernel_traits>::size(num_slots), stream>>>(params, num_slots);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    if (params.num_splits <= 1) {
        launch(dim3(params.h, params.b));
        return;
    }
    fork_slices::each(params, fork_slices::kRows, [&](const dim3) {
        const int h = params.fork.slice.h, b = params.fork.slice.b;
        launch(dim3(h, b, std::min(params.fork.slice.splits, std::max(1, most_blocks() / (h * b)))));
        if (params.fork.n_blocks_per_split > 0) { run_fork_combine<Kernel_traits>(params, stream); }
    });
}

}  // namespace fork_narrow
}  // namespace FLASH_NAMESPACE

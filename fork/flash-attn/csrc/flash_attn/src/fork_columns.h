// Blocks of keys that a mask hides which all queries share.
//
// The thread block of such keys has nothing to do in the backward pass. In deterministic mode it would still
// have to wait for its turn at each block of queries, only to pass it on. So it has none: a block's place in
// the order is its place among those that the mask leaves, which every thread block finds for itself.

#pragma once

#include "namespace_config.h"
#include "fork_tile.h"

namespace FLASH_NAMESPACE {
namespace fork_bias {

// The place of a block of keys among those that are left; -1 if the mask hides it. All threads ask. Where
// queries have masks of their own, or windows, all blocks are left.
template<typename Kernel_traits, typename Params, typename BlockInfo>
__forceinline__ __device__ int place_of_column(const Params &params, const BlockInfo &binfo, const int bidb,
    const int bidh, const int n_block, const bool by_turns) {
    constexpr int kBlockN = Kernel_traits::kBlockN;
    const View &mask = params.fork.scores.mask;
    if (mask.ptr == nullptr || mask.row_stride != 0 || (!params.is_causal && params.fork.scores.windowed)) {
        return n_block;
    }
    const auto seen = [&](const int block) {  // a warp asks
        const uint32_t word = Visible<1, kBlockN / 4>::load_shared_row(
            mask, binfo, bidb, bidh, block * kBlockN, block <= n_block ? num_keys(params, binfo) : -1);
        return __any_sync(0xffffffff, word != 0);
    };
    if (!seen(n_block)) { return -1; }
    if (!by_turns) { return n_block; }
    int before = 0;
    for (int first = 0; first < n_block; first += Kernel_traits::kNWarps) {
        const int block = first + int(threadIdx.x) / 32;
        before += __syncthreads_count(seen(block) && block < n_block && threadIdx.x % 32 == 0);
    }
    return before;
}

}  // namespace fork_bias
}  // namespace FLASH_NAMESPACE

// flash_fwd_kernel that walks several chunks and folds them, and which calls need it.

#pragma once

#include "namespace_config.h"
#include "flash.h"
#include "fork_keys.h"

namespace FLASH_NAMESPACE {

// flash_fwd_kernel is compiled once more with these, for calls without a window, slopes, softcap and dropout,
// whose head dim is the kernel's.
template<typename Kernel_traits>
struct Walking : Kernel_traits {};

template<typename Kernel_traits, bool Is_dropout>
constexpr bool kMayWalk = !Is_dropout && Kernel_traits::kHeadDim <= 128 && Kernel_traits::kBlockM == 128
    && Kernel_traits::kBlockN == fork_keys::step(Kernel_traits::kHeadDim);

template<typename Kernel_traits>
constexpr bool kWalks = false;
template<typename Kernel_traits>
constexpr bool kWalks<Walking<Kernel_traits>> = true;

// Calls of several chunks do; and those of which a sequence may be longer than the call says, for it must
// notice (poison_rows).
inline bool needs_walking(const Flash_fwd_params &params) {
    return params.fork.n_blocks_per_split > 0
        && (params.fork.num_chunks > 1 || params.cu_seqlens_q != nullptr || params.cu_seqlens_k != nullptr);
}

// Blocks up to that in which the longest key length that the call named ends: a cache may end there.
template<typename Kernel_traits>
constexpr int named_blocks(const Flash_fwd_params &params) {
    constexpr int tile = fork_keys::tile(Kernel_traits::kHeadDim);
    return (params.seqlen_k + tile - 1) / tile * (tile / Kernel_traits::kBlockN);
}

}  // namespace FLASH_NAMESPACE

// The launch of a split kernel: its rows and shared memory, which masks, biases and turns decide.

#pragma once

#include "namespace_config.h"
#include "flash.h"
#include "fork_chunks.h"
#include "fork_fold_in_turns.h"
#include "fork_keys.h"
#include "fork_occupancy.h"
#include "fork_pages.h"
#include "fork_stage.h"
#include "hardware_info.h"
#include "kernel_traits.h"

namespace FLASH_NAMESPACE {
namespace fork_bias {

// Where one thread block walks all chunks, or two in turns, 128 rows to a block, as in the standard kernels:
// they share what is loaded of keys. Registers have room for them up to head dim 64, but for a few that
// change once a tile. By the traits' parameters, for Kernel_traits::Element is half_t in every host pass.
template<typename Kernel_traits>
struct TallOf {
    using type = Kernel_traits;
};
template<int kHeadDim, int kBlockM, int kBlockN, int kNWarps, typename T, typename Base>
struct TallOf<Flash_fwd_kernel_traits<kHeadDim, kBlockM, kBlockN, kNWarps, false, false, T, Base>> {
    using type =
        Flash_fwd_kernel_traits<kHeadDim, kHeadDim <= 64 ? 128 : kBlockM, kBlockN, kNWarps, false, false, T>;
};
template<typename Kernel_traits>
using Tall = typename TallOf<Kernel_traits>::type;
template<typename Kernel_traits>
constexpr bool kMayBeTall = Tall<Kernel_traits>::kBlockM > Kernel_traits::kBlockM;

struct Launch {
    int rows;  // of a thread block
    size_t smem_size;
};

template<typename Kernel_traits, typename CallParams>
Launch launch_of(CallParams &params) {
    const size_t running =
        params.num_splits == 1 && params.fork.num_chunks > 1 ? kChunkFoldBytes<Kernel_traits> : 0;
    return {Kernel_traits::kBlockM,
        stage<ForwardStage<Kernel_traits>>(params, Kernel_traits::kSmemSize + running)};
}

// Of any call of the split kernel. Where values are finite a row has the same bits in both kernels, so which
// one runs may follow from the GPU and the batch.
template<typename Kernel_traits, typename CallParams>
Launch launch(CallParams &params) {
    static_assert(Kernel_traits::kBlockN == fork_keys::tile(Kernel_traits::kHeadDim));
    if constexpr (kMayBeTall<Kernel_traits>) {
        using InPairs = fork_in_turns::InPairs<Tall<Kernel_traits>>;
        constexpr int smem_size = fork_occupancy::tall_smem(Kernel_traits::kHeadDim);
        static_assert(InPairs::kBlockM == fork_in_turns::kTallRows);
        static_assert(smem_size == InPairs::kSmemSize + kChunkFoldBytes<InPairs>);
        if (params.fork.tall_turns) { return {InPairs::kBlockM, smem_size}; }
    }
    const Launch usual = launch_of<Kernel_traits>(params);
    if constexpr (kBuilt && kMayBeTall<Kernel_traits>) {
        if (!params.fork.scores.any() || params.num_splits > 1 || params.d != Kernel_traits::kHeadDim
            || params.fork.scores.rows == Kernel_traits::kBlockM
            || fork_pages::small<Kernel_traits>(params)) {
            return usual;
        }
        const bool staged = params.fork.scores.stage_at != 0;
        const Launch tall = launch_of<Tall<Kernel_traits>>(params);
        const int64_t num_blocks =
            int64_t(params.b) * params.h * ((params.seqlen_q + tall.rows - 1) / tall.rows);
        const bool fits =
            fork_occupancy::two_fit(tall.smem_size) && (params.fork.scores.stage_at != 0) == staged;
        const bool fills = params.seqlen_q > Kernel_traits::kBlockM
            && fork_occupancy::fills(num_blocks, 2 * get_num_sm(get_current_device()));
        if (params.fork.scores.rows == tall.rows || (fits && fills)) { return tall; }
        return launch_of<Kernel_traits>(params);  // which sets params again
    }
    return usual;
}

}  // namespace fork_bias
}  // namespace FLASH_NAMESPACE

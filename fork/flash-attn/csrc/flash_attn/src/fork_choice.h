// Which kernel a call takes, of those that upstream's launch templates and ours are compiled into.
//
// Template parameters are named as those of upstream's kernels, and say what a call asks for. fork_variants.h
// says which kernels are compiled for that. A call whose mask or bias is not simple does not come to
// forward() (fork_simple_call.h).

#pragma once

#include "namespace_config.h"
#include "flash.h"
#include "fork_bias.h"
#include "fork_bias_launch.h"
#include "fork_chunks.h"
#include "fork_gpus.h"
#include "fork_in_turns.h"
#include "fork_occupancy.h"
#include "fork_runtime.h"
#include "fork_simple.h"
#include "fork_variants.h"
#include "fork_walking.h"
#include "kernel_traits.h"

namespace FLASH_NAMESPACE {

// As upstream's KERNEL_PARAM_MODIFIER, which is defined after the includes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define FORK_GRID_CONSTANT __grid_constant__
#else
#define FORK_GRID_CONSTANT
#endif

template<typename Kernel_traits, bool Is_dropout, bool Is_causal, bool Is_local, bool Has_alibi,
    bool Is_even_MN, bool Is_even_K, bool Is_softcap, bool Return_softmax>
__global__ void flash_fwd_kernel(FORK_GRID_CONSTANT const Flash_fwd_params params);

template<typename Kernel_traits, bool Is_causal, bool Is_local, bool Has_alibi, bool Is_even_MN,
    bool Is_even_K, bool Is_softcap, bool Split, bool Append_KV>
__global__ void flash_fwd_splitkv_kernel(FORK_GRID_CONSTANT const Flash_fwd_params params);

template<typename Kernel_traits, bool Is_dropout, bool Is_causal, bool Is_local, bool Has_alibi,
    bool Is_even_MN, bool Is_even_K, bool Is_softcap, bool Ordered>
__global__ void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel(
    FORK_GRID_CONSTANT const Flash_bwd_params params);

namespace fork_choice {

template<typename Kernel_traits, bool Is_dropout, bool Is_causal, bool Is_local, bool Has_alibi,
    bool Is_even_MN, bool Is_even_K, bool Is_softcap, bool Return_softmax>
auto forward(const Flash_fwd_params &params) {
    if constexpr (kMayWalk<Kernel_traits, Is_dropout>) {
        if constexpr (fork_bias::kBuilt) {
            if (params.fork.scores.any()) {
                return &flash_fwd_kernel<Walking<fork_bias::Simple<Kernel_traits>>, false, Is_causal, false,
                    false, false, true, false, false>;
            }
        }
        if (needs_walking(params)) {
            return &flash_fwd_kernel<Walking<Kernel_traits>, false, Is_causal, false, false, Is_even_MN, true,
                false, false>;
        }
    }
    using Variant = fork_variants::Forward<Kernel_traits, Is_dropout, Is_local, Has_alibi, Is_even_MN,
        Is_even_K, Is_softcap, Return_softmax>;
    return &flash_fwd_kernel<Kernel_traits, Is_dropout, Is_causal, Is_local, Variant::Has_alibi,
        Variant::Is_even_MN, Variant::Is_even_K, Variant::Is_softcap, Variant::Return_softmax>;
}

// The shared memory of that kernel, in bytes.
template<typename Kernel_traits, bool Is_dropout>
size_t forward_smem(Flash_fwd_params &params) {
    size_t running = 0;  // results of chunks
    if constexpr (kMayWalk<Kernel_traits, Is_dropout>) {
        if (needs_walking(params)) { running = kChunkFoldBytes<Walking<Kernel_traits>>; }
    }
    return fork_bias::simple_smem<Kernel_traits>(params, Kernel_traits::kSmemSize + running);
}

// Calls that walk several chunks above head dim 128, in the same tiles on every GPU that has room for them.
template<typename T, int Headdim, bool Is_causal>
void run_walking(Flash_fwd_params &params, cudaStream_t stream) {
    using Kernel_traits = Walking<Flash_fwd_kernel_traits<Headdim, 128, 64, 8, false, false, T>>;
    constexpr static int smem_size = fork_occupancy::standard_smem(Headdim, /*walks=*/true);
    const int max_smem_per_block = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    GPU_SWITCH(max_smem_per_block >= smem_size, Has_room, [&] {
        if constexpr (Has_room) {
            auto kernel =
                &flash_fwd_kernel<Kernel_traits, false, Is_causal, false, false, false, true, false, false>;
            C10_CUDA_CHECK(
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_size));
            const dim3 grid((params.seqlen_q + 128 - 1) / 128, params.b, params.h);
            kernel<<<grid, Kernel_traits::kNThreads, smem_size, stream>>>(params);
            C10_CUDA_KERNEL_LAUNCH_CHECK();
        }
    });
}

// Append_KV says that a call has new keys, or pages or heads that only kernels for these serve. Sets a window
// without bounds where the kernel is compiled for one.
template<typename Kernel_traits, bool Is_causal, bool Is_local, bool Has_alibi, bool Is_even_MN,
    bool Is_even_K, bool Is_softcap, bool Split, bool Append_KV>
auto split(Flash_fwd_params &params, const fork_bias::Launch &launch) {
    using fork_bias::Tall;
    constexpr bool kMayBeTall = fork_bias::kMayBeTall<Kernel_traits>;
    if constexpr (kMayBeTall && Split && !Append_KV) {
        if (params.fork.tall_turns) {
            return &flash_fwd_splitkv_kernel<fork_in_turns::InPairs<Tall<Kernel_traits>>, Is_causal, false,
                false, false, true, false, true, false>;
        }
    }
    if constexpr (fork_bias::kBuilt) {
        if (params.fork.scores.any()) {
            fork_bias::give_window(params);
            if constexpr (kMayBeTall && !Split && Is_even_K) {
                if (launch.rows > Kernel_traits::kBlockM) {
                    return &flash_fwd_splitkv_kernel<fork_bias::WithScores<Tall<Kernel_traits>>, Is_causal,
                        !Is_causal, true, false, true, true, false, true>;
                }
            }
            constexpr bool Is_local_call = !Is_causal, Is_even = Is_even_K && !Split;
            return &flash_fwd_splitkv_kernel<fork_bias::WithScores<Kernel_traits>, Is_causal, Is_local_call,
                true, false, Is_even, true, Split, true>;
        }
    }
    using Variant = fork_variants::Split<Kernel_traits, Is_local, Has_alibi, Is_even_MN, Is_even_K,
        Is_softcap, Append_KV>;
    return &flash_fwd_splitkv_kernel<Kernel_traits, Is_causal, Is_local, Has_alibi, Variant::Is_even_MN,
        Variant::Is_even_K, Variant::Is_softcap, Split, Variant::Append_KV>;
}

// Of both orders of dQ's sums: upstream's, and by turns in deterministic mode, where one kernel serves all
// lengths. Ask once params.fork.scores says what is staged. Sets a window without bounds where there is none.
template<typename Kernel_traits, bool Is_dropout, bool Is_causal, bool Is_local, bool Has_alibi,
    bool Is_even_MN, bool Is_even_K, bool Is_softcap>
auto backward(Flash_bwd_params &params) {
    const bool by_turns = params.fork_bwd.dq_turns != nullptr;
    const fork_bias::Params &scores = params.fork.scores;
    const bool is_simple = fork_bias::is_simple(params) && fork_bias::is_shared(scores.mask)
        && (scores.bias.ptr == nullptr || scores.stage_at != 0);
    fork_bias::give_window(params);
    if constexpr (fork_bias::kBuilt && !Is_dropout) {
        if constexpr (!Has_alibi && !Is_softcap && !Is_local && Is_even_K && Kernel_traits::kHeadDim <= 128) {
            using Simple = fork_bias::Simple<Kernel_traits>;
            if (is_simple) {
                return by_turns ? &flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Simple, false, Is_causal,
                                      false, false, false, true, false, true>
                                : &flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Simple, false, Is_causal,
                                      false, false, false, true, false, false>;
            }
        }
        if (scores.any() || (Has_alibi && Is_softcap)) {
            constexpr bool Is_even = Is_even_K && !Is_softcap;
            return &flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<fork_bias::WithScores<Kernel_traits>, false,
                Is_causal, !Is_causal, true, false, Is_even, Is_softcap, true>;
        }
    }
    using Variant = fork_variants::Backward<Kernel_traits, Is_dropout, Is_causal, Is_local, Has_alibi,
        Is_even_MN, Is_even_K, Is_softcap>;
    return by_turns ? &flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Kernel_traits, Is_dropout, Is_causal,
                          Variant::Is_local, Variant::Has_alibi, false, Variant::Is_even_K,
                          Variant::Is_softcap, !Is_dropout>
                    : &flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Kernel_traits, Is_dropout, Is_causal,
                          Variant::Is_local, Variant::Has_alibi, Variant::Is_even_MN, Variant::Is_even_K,
                          Variant::Is_softcap, false>;
}

}  // namespace fork_choice
}  // namespace FLASH_NAMESPACE

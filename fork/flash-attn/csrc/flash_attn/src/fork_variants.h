// Which kernels there are: what one is compiled for, and what it asks at run time.
//
// Calls without a window, slopes, softcap and dropout have upstream's kernels; but those of several splits or
// of a cache, where the head dim is none of the compiled ones, have those that may append, which ask whether
// there are new keys; and those that combine splits compare columns. Of other calls there are fewer kernels
// than upstream's: none for even lengths, which spare the forward pass nothing but masking one tile, and the
// backward pass a comparison for each score; forward, none for calls without new keys, and one for slopes
// with a softcap or without, which it asks for once a tile; and backward, with dropout, slopes or a softcap,
// none for an even head dim and, where not causal, none without a window: a call may have one without bounds
// (fork_bias::give_window), for which no more tiles are masked.

#pragma once

#include <climits>  // INT_MAX: flash_fwd_kernel.h
#include <type_traits>

#include "namespace_config.h"
#include "fork_bias.h"

namespace FLASH_NAMESPACE {
namespace fork_variants {

// The constants are named as the parameters of upstream's kernels; the arguments are what a call asks for.
template<typename Kernel_traits, bool Dropout, bool Local, bool Alibi, bool Even_MN, bool Even_K,
    bool Softcap, bool Softmax>
struct Forward {
    static constexpr bool Return_softmax = Softmax && Dropout;
    static constexpr bool Has_alibi = Alibi || Return_softmax;          // slopes of 0 where there are none
    static constexpr bool Is_softcap = !Dropout && (Softcap || Alibi);  // with dropout a call has none
    static constexpr bool Is_even_K = Even_K && !Has_alibi;
    static constexpr bool Is_even_MN =
        Even_MN && Is_even_K && !Dropout && !Local && !Is_softcap && Kernel_traits::kHeadDim <= 128;
};

template<typename Kernel_traits, bool Local, bool Alibi, bool Even_MN, bool Even_K, bool Softcap,
    bool New_keys>
struct Split {
    static constexpr bool Is_softcap = Softcap || Alibi;
    static constexpr bool Is_even_K = Even_K && !Alibi;
    static constexpr bool Append_KV = New_keys || Local || Is_softcap || !Is_even_K;
    static constexpr bool Is_even_MN = Even_MN && Is_even_K && !Append_KV && Kernel_traits::kHeadDim <= 128;
};

template<typename Kernel_traits, bool Dropout, bool Causal, bool Local, bool Alibi, bool Even_MN, bool Even_K,
    bool Softcap>
struct Backward {
    static constexpr bool Is_local = !Causal && (Local || Dropout || Alibi || Softcap);
    static constexpr bool Is_softcap = !Dropout && Softcap;
    // Slopes with a softcap: as with a mask or a bias
    static constexpr bool Has_alibi = Alibi && !(Is_softcap && fork_bias::kBuilt);
    static constexpr bool Is_even_K = Even_K && !Dropout && !Alibi && !Softcap;
    static constexpr bool Is_even_MN = Even_MN && Is_even_K && !Is_local && Kernel_traits::kHeadDim <= 128;
};

// Whether kernels that were compiled for it, and ask, have it. Those of calls with a mask or a bias have
// slopes too.
template<bool Asks, typename Params>
constexpr bool has_softcap(const Params &params) {
    return !Asks || params.softcap > 0.f;
}

// Kernels that combine splits compare columns with the head dim, even or not: they wait for memory.
template<typename Launch>
void uneven_head_dim(Launch &&launch) {
    launch(std::false_type{});
}

// Whether one loop serves all keys: each tile is masked anyhow. Elsewhere the last keys have copies of it
// that mask.
constexpr bool one_loop(bool local, bool alibi) { return local || alibi; }

}  // namespace fork_variants
}  // namespace FLASH_NAMESPACE

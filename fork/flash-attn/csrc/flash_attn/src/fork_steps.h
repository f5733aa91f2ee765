// The steps in which the split kernels take the online softmax in deterministic mode: the standard kernels'.
//
// A row's bits follow from the keys of a step. From head dim 65 to 128 the split kernels load and multiply
// twice as many keys at once as the standard kernels. They go on doing so, but take the softmax and the
// product with V over one half of the scores after the other, from the last key to the first: what the
// standard kernel does tile by tile.

#pragma once

#include <cute/tensor.hpp>

#include "namespace_config.h"
#include "flash.h"
#include "fork_keys.h"
#include "utils.h"

namespace FLASH_NAMESPACE {

using namespace cute;

namespace fork_steps {

template<typename Kernel_traits>
constexpr int kSteps = Kernel_traits::kBlockN / fork_keys::step(Kernel_traits::kHeadDim);

template<typename Kernel_traits>
__forceinline__ __device__ bool several(const Flash_fwd_params &params) {
    return kSteps<Kernel_traits> > 1 && params.fork.n_blocks_per_split > 0;
}

// What softmax_rescale_o and gemm_rs do to a whole tile, step by step. Scores are ((2, 2), M, N): N, tiles of
// eight keys, is outermost.
template<typename Kernel_traits, bool Check_inf, typename Softmax, typename Scores, typename Acc,
    typename TensorV, typename SharedV, typename Mma, typename Copy, typename ThrCopy>
__forceinline__ __device__ void softmax_times_v(const bool is_first, Softmax &softmax, Scores &scores,
    Acc &acc_o, TensorV &tOrVt, const SharedV &tOsVt, Mma tiled_mma, Copy smem_tiled_copy_V,
    ThrCopy smem_thr_copy_V, const float scale_log2) {
    constexpr int kN = decltype(size<2>(scores))::value / kSteps<Kernel_traits>;
    constexpr int kK = kN / 2;  // V's tiles have 16 keys
    auto tOrVt_copy = smem_thr_copy_V.retile_D(tOrVt);
    #pragma unroll
    for (int step = kSteps<Kernel_traits> - 1; step >= 0; --step) {
        Tensor part = make_tensor(scores.data() + step * kN * int(size<0>(scores)) * int(size<1>(scores)),
            make_layout(make_shape(shape<0>(scores.layout()), shape<1>(scores.layout()), Int<kN>{})));
        if (is_first && step == kSteps<Kernel_traits> - 1) {
            softmax.template softmax_rescale_o</*Is_first=*/true, Check_inf>(part, acc_o, scale_log2);
        } else {
            softmax.template softmax_rescale_o</*Is_first=*/false, Check_inf>(part, acc_o, scale_log2);
        }
        Tensor rP = FLASH_NAMESPACE::convert_type<typename Kernel_traits::Element>(part);
        Tensor tOrP = make_tensor(rP.data(),
            FLASH_NAMESPACE::convert_layout_acc_Aregs<typename Kernel_traits::TiledMma>(rP.layout()));
        #pragma unroll
        for (int i = 0; i < kK; ++i) {
            const int k = step * kK + i;
            if (i == 0) { cute::copy(smem_tiled_copy_V, tOsVt(_, _, k), tOrVt_copy(_, _, k)); }
            if (i < kK - 1) { cute::copy(smem_tiled_copy_V, tOsVt(_, _, k + 1), tOrVt_copy(_, _, k + 1)); }
            cute::gemm(tiled_mma, tOrP(_, _, i), tOrVt(_, _, k), acc_o);
        }
    }
}

}  // namespace fork_steps
}  // namespace FLASH_NAMESPACE

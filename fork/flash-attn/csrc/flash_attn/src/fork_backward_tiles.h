// attn_mask and attn_bias in the backward pass: a thread block's tiles, from the last queries to the first.

#pragma once

#include "namespace_config.h"
#include "fork_order.h"
#include "fork_tile.h"

namespace FLASH_NAMESPACE {

template<typename Kernel_traits>
constexpr bool fork_order::kAsksForTurns<fork_bias::WithScores<Kernel_traits>> = true;

namespace fork_bias {

template<typename Kernel_traits, typename Params, typename BlockInfo>
struct BackwardTiles {
    static constexpr int kBlockM = Kernel_traits::kBlockM, kBlockN = Kernel_traits::kBlockN;
    static constexpr int kWarpsM = Kernel_traits::AtomLayoutMSdP, kWarpsN = Kernel_traits::kNWarps / kWarpsM;
    static constexpr int kRows = 2 * kBlockM / (16 * kWarpsM), kKeys = kBlockN / kWarpsN / 4;
    static_assert(kBlockM % (16 * kWarpsM) == 0);

    const Params &params;
    const BlockInfo &binfo;
    const int bidb, bidh, n_block;
    Visible<kRows, kKeys> visible;

    __forceinline__ __device__ BackwardTiles(
        const Params &params, const BlockInfo &binfo, const int bidb, const int bidh, const int n_block)
        : params(params), binfo(binfo), bidb(bidb), bidh(bidh), n_block(n_block) {}

    // Behind the barrier at which a step begins. Whether a row of the tile sees a key: the same for all
    // threads, which must all ask.
    __forceinline__ __device__ bool load(const int m_block) {
        const bool any = visible.load(
            params, binfo, bidb, bidh, thread_tile(m_block), first_key(), num_keys(params, binfo));
        return params.fork.scores.mask.ptr == nullptr || __syncthreads_or(any);
    }

    // The bias of a tile, if it is staged. Nothing commits these copies to a group: cute::cp_async_wait<0>,
    // with which a step begins, is cp.async.wait_all. FLASH_NAMESPACE::cp_async_wait<0>, which waits for
    // groups alone, would not do.
    __forceinline__ __device__ void fetch(const int m_block) const {
        const int keys = num_keys(params, binfo) - first_key();
        if (params.fork.scores.stage_at == 0 || keys <= 0) { return; }
        BackwardStage<Kernel_traits>::fetch(params.fork.scores, bias(m_block),
            binfo.actual_seqlen_q - first_row(m_block), min(keys, kKeys * 4));
    }

    // Applies mask and bias to a tile's scores, if they count, and fetches the next tile's.
    template<typename Scores>
    __forceinline__ __device__ void apply(
        Scores &scores, const int m_block, const int m_block_min, const bool any_visible) const {
        using Element = typename Kernel_traits::Element;
        if (any_visible) {
            if (params.fork.scores.bias.ptr == nullptr) {
            } else if (params.fork.scores.stage_at == 0) {
                visible.template add_in_place<Element>(
                    params.fork.scores, binfo, bidb, bidh, thread_tile(m_block), first_key(), scores);
            } else {
                BackwardStage<Kernel_traits>::template add<Element>(
                    params.fork.scores, bias(m_block), scores);
            }
            visible.hide(scores);
        }
        __syncwarp();  // its lanes have read the bias
        if (m_block > m_block_min) { fetch(m_block - 1); }
    }

private:
    __forceinline__ __device__ ThreadTile thread_tile(const int m_block) const {
        return {m_block * kBlockM + int(threadIdx.x) / 32 % kWarpsM * 16 + int(threadIdx.x) % 32 / 4,
            kWarpsM * 16};
    }
    __forceinline__ __device__ int first_row(const int m_block) const {
        return thread_tile(m_block).row - int(threadIdx.x) % 32 / 4;
    }
    __forceinline__ __device__ int first_key() const {
        return n_block * kBlockN + int(threadIdx.x) / 32 / kWarpsM * (kBlockN / kWarpsN);
    }

    // Where the warp's part of a tile of the bias begins.
    __forceinline__ __device__ const char *bias(const int m_block) const {
        const View &view = params.fork.scores.bias;
        const int size = params.fork.scores.bias_is_float ? 4 : 2;
        return slice<char>(view, binfo, bidb, bidh, size)
            + (first_row(m_block) * view.row_stride + first_key()) * size;
    }
};

}  // namespace fork_bias
}  // namespace FLASH_NAMESPACE

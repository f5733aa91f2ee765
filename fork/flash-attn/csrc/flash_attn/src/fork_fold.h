// The fold: how the partial results of a row's chunks of keys become the row.
//
// A chunk's partial result is what the online softmax holds at its end: the largest score, the sum of
// exponentials over all its keys, and the accumulator, not normalised. Chunks are folded one by one from the
// last to the first, in one arithmetic with explicit rounding, wherever that happens: in the thread block
// that walks them (ChunkFold), in those of the chunks themselves, in turns (fork_in_turns.h), or in
// fork_combine_kernel, which gets them from memory.
//
// Neutral is a chunk in which a row sees no key, if keys and values are finite: folding one changes no bit,
// the sign of zeros included. So it does not matter which other rows make a thread block walk it.

#pragma once

#include "namespace_config.h"
#include "block_info.h"
#include "flash.h"
#include "softmax.h"

namespace FLASH_NAMESPACE {
namespace fork_fold {

struct Weights {
    float run, part;  // of the accumulators; see fold_element
};

// Folds a chunk's max and sum into the running ones.
__forceinline__ __device__ Weights fold_row(
    float &max, float &sum, const float part_max, const float part_sum, const float scale_log2) {
    if (part_max == -INFINITY && part_sum == 0.f) { return {1.f, -0.f}; }
    if (max == -INFINITY && sum == 0.f) {
        max = part_max;
        sum = part_sum;
        return {-0.f, 1.f};
    }
    const float larger = fmaxf(max, part_max);
    const Weights weights{exp2f(__fmul_rn(__fsub_rn(max, larger), scale_log2)),
        exp2f(__fmul_rn(__fsub_rn(part_max, larger), scale_log2))};
    max = larger;
    sum = __fmaf_rn(weights.part, part_sum, __fmul_rn(weights.run, sum));
    return weights;
}

// A chunk's sum over all its keys: the four threads of a row have their parts of it.
template<typename Softmax>
__forceinline__ __device__ void sum_row(Softmax &softmax) {
    SumOp<float> sum_op;
    quad_allreduce_(softmax.row_sum, softmax.row_sum, sum_op);
}

// Minus zero times an accumulator that is plus zero is minus zero, which leaves the other summand as it is.
__forceinline__ __device__ float fold_element(const Weights weights, const float run, const float part) {
    return __fmaf_rn(weights.part, part, __fmul_rn(weights.run, run));
}

// In the words of upstream's normalize_softmax_lse, which calls within one chunk may run: a row that sees no
// key gives zeros and lse +inf.
__forceinline__ __device__ float inverse_sum(const float sum) {
    return sum == 0.f || sum != sum ? 1.f : 1.f / sum;
}
__forceinline__ __device__ float log_sum_exp(const float max, const float sum, const float scale) {
    return sum == 0.f || sum != sum ? INFINITY : max * scale + __logf(sum);
}

// Where a row's lse lies; the three layouts of get_lse_tile.
template<typename BlockInfo>
__forceinline__ __device__ int64_t lse_offset(
    const Flash_fwd_params &params, const BlockInfo &binfo, const int bidb, const int bidh, const int row) {
    if (!params.unpadded_lse) { return (int64_t(bidb) * params.h + bidh) * params.seqlen_q + row; }
    if (params.seqlenq_ngroups_swapped) { return (int64_t(bidh) * params.seqlen_q + row) * params.b + bidb; }
    return int64_t(bidh) * params.total_q + binfo.q_offset(int64_t(params.seqlen_q), int64_t(1), bidb) + row;
}

template<typename BlockInfo>
__forceinline__ __device__ void write_lse(const Flash_fwd_params &params, const BlockInfo &binfo,
    const int bidb, const int bidh, const int row, const float lse) {
    reinterpret_cast<float *>(params.softmax_lse_ptr)[lse_offset(params, binfo, bidb, bidh, row)] = lse;
}

struct Keys {
    int begin, end;
};

// The keys that a row may see, as the split kernel's Mask has them.
template<typename BlockInfo>
__forceinline__ __device__ Keys visible_keys(
    const Flash_fwd_params &params, const BlockInfo &binfo, const int row) {
    const int diagonal = row + binfo.actual_seqlen_k - binfo.actual_seqlen_q;
    const bool bounded = params.is_causal || params.window_size_left >= 0 || params.window_size_right >= 0;
    return {bounded && !params.is_causal ? std::max(0, diagonal - params.window_size_left) : 0,
        bounded ? std::min(binfo.actual_seqlen_k, diagonal + 1 + params.window_size_right)
                : binfo.actual_seqlen_k};
}

// Whether keys lie in caches, each of which ends where it ends whatever length the caller gives.
__forceinline__ __device__ bool has_caches(const Flash_fwd_params &params) {
    return params.cu_seqlens_k != nullptr && !params.is_seqlens_k_cumulative;
}

// The keys that the call named for its longest sequence, or that a cache has behind its padding.
template<typename BlockInfo>
__forceinline__ __device__ int named_keys(const Flash_fwd_params &params, const BlockInfo &binfo) {
    return has_caches(params) ? params.seqlen_k - binfo.leftpad_k : params.seqlen_k;
}

// Whether some of a row's lie past those.
template<typename BlockInfo>
__forceinline__ __device__ bool falls_short(
    const Flash_fwd_params &params, const BlockInfo &binfo, const Keys keys) {
    return keys.begin < keys.end && keys.end > named_keys(params, binfo);
}

// The lse of a row's partial result with the mode off, which upstream's kernel folds: NaN where the row would
// need keys past its cache, so that the row is NaN too.
template<typename BlockInfo>
__forceinline__ __device__ float or_short(
    const Flash_fwd_params &params, const BlockInfo &binfo, const int row, const float lse) {
    if (params.fork.n_blocks_per_split > 0 || !has_caches(params)) { return lse; }
    return falls_short(params, binfo, visible_keys(params, binfo, row)) ? NAN : lse;
}

}  // namespace fork_fold

}  // namespace FLASH_NAMESPACE

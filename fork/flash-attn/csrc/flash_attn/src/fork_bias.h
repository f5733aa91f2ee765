// attn_mask and attn_bias: what the kernels are told of them.

#pragma once

#include <cstdint>

#include "namespace_config.h"
#include "fork_window.h"

namespace FLASH_NAMESPACE {
namespace fork_bias {

#if defined(FORK_NO_BIAS)
constexpr bool kBuilt = false;
#else
constexpr bool kBuilt = true;
#endif

// The element of sequence b, head h, row i and key j lies at
// b * batch_stride + h / heads_per_slice * head_stride + i * row_stride + j * key_stride; packed rows follow
// each other.
struct View {
    const void *ptr;
    int64_t batch_stride, head_stride, row_stride, key_stride;
    int heads_per_slice = 1;
};

constexpr int kTerms = 2;
constexpr int kPiece = 16;  // bytes that are fetched at once
// Fp16's largest: finite biases beyond it count as that, whatever their type
constexpr float kMostBias = 65504.f;

struct Params {
    View mask, bias;
    bool bias_is_float;   // else of the queries' type
    bool windowed;        // where not causal
    bool bias_in_pieces;  // rows begin at a multiple of 16 bytes
    int stage_at;         // where the bias is in shared memory; 0 if it is not
    int rows;             // of a thread block, where tests ask for so many; else 0
    float inverse_scale;  // the kernels scale scores after the bias has been added
    // If the bias has the queries' type: numbers of it whose sum that is, their bits, the larger first
    uint16_t inverse_terms[kTerms];
    int mask_slots;  // tiles of each query's own mask that shared memory holds at once, if any

    constexpr bool any() const { return mask.ptr != nullptr || bias.ptr != nullptr; }
};

// Calls with a mask or a bias have kernels of their own: those of other calls are what they are in a build
// without.
template<typename Kernel_traits>
struct WithScores : Kernel_traits {};

template<typename Kernel_traits>
constexpr bool Has_scores = false;
template<typename Kernel_traits>
constexpr bool Has_scores<WithScores<Kernel_traits>> = true;

// Of the split kernels: with more rows in a thread block than upstream's (fork_bias_launch.h).
template<typename Kernel_traits>
constexpr bool kIsTall = Kernel_traits::kBlockM > 64;

// What other kernels are compiled for, these ask at run time: so there are few of them.
template<typename Kernel_traits, typename Params>
constexpr bool has_slopes(const Params &params) {
    return !Has_scores<Kernel_traits> || params.alibi_slopes_ptr != nullptr;
}
template<typename Kernel_traits, typename Params>
constexpr bool has_window(const Params &params) {
    return !Has_scores<Kernel_traits> || params.fork.scores.windowed;
}

// Kernels that are not causal may be compiled for a window alone; a call without gets one with no bounds.
// Call before the launch.
template<typename Params>
void give_window(Params &params) {
    params.fork.scores.windowed = params.window_size_left >= 0 || params.window_size_right >= 0;
    if (!params.is_causal && !params.fork.scores.windowed) {
        params.window_size_left = params.window_size_right = fork_window::kUnbounded;
    }
}

// Whether the rows of a view, of elements of so many bytes, begin at multiples of kPiece, and their keys
// follow each other.
inline bool in_pieces(const View &view, const int size, const int seqlen_k) {
    return (view.key_stride == 1 || seqlen_k == 1)
        && (reinterpret_cast<uintptr_t>(view.ptr)
               | uintptr_t((view.batch_stride | view.head_stride | view.row_stride) * size))
            % kPiece
        == 0;
}

// Whether all queries have the same mask, or none.
constexpr bool is_shared(const View &mask) { return mask.ptr == nullptr || mask.row_stride == 0; }

// Whether fork_simple.h serves a call; backward, if all queries share the mask. Ask before give_window.
template<typename CallParams>
bool is_simple(const CallParams &params) {
    const View &mask = params.fork.scores.mask, &bias = params.fork.scores.bias;
    const bool windowed =
        !params.is_causal && (params.window_size_left >= 0 || params.window_size_right >= 0);
    const bool other = params.cu_seqlens_q != nullptr || params.cu_seqlens_k != nullptr
        || params.knew_ptr != nullptr || params.block_table != nullptr || params.leftpad_k != nullptr
        || params.alibi_slopes_ptr != nullptr || params.softcap > 0.f || windowed;
    return params.fork.scores.any() && !other && (is_shared(mask) || in_pieces(mask, 1, params.seqlen_k))
        && (bias.ptr == nullptr
            || (!params.fork.scores.bias_is_float && in_pieces(bias, 2, params.seqlen_k)));
}

// The gradient of the bias, whose keys follow each other; null where nobody asks for it.
struct Gradient {
    void *ptr;  // of the first part
    bool is_float;
    int64_t part_stride, batch_stride, head_stride, row_stride;
    int heads_per_slice;  // 1: each head has its own
    bool batch_shares, rows_share;
    bool rows_follow;       // packed rows: each sequence has its own
    int parts, head_parts;  // how many float32 summands it is in; of them, those of other heads
};

}  // namespace fork_bias
}  // namespace FLASH_NAMESPACE

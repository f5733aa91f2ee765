// Fixed split extent: what the deterministic mode asks of a forward call, on the host.

#pragma once

#include <algorithm>
#include <limits>

#include "namespace_config.h"
#include "core/error.h"
#include "core/host.h"
#include "flash.h"
#include "fork_walking.h"
#include "fork_in_turns.h"
#include "fork_kernel_set.h"
#include "fork_keys.h"
#include "fork_mode.h"
#include "fork_occupancy.h"
#include "fork_runtime.h"
#include "fork_slices.h"
#include "fork_window.h"

namespace FLASH_NAMESPACE {
namespace fork_split {

// Tokens in each split of this call; 0 where the mode is off or does not reach.
inline int split_size_of_call(const core::Host &host, const fork_mode::Mode mode, int head_size,
    float softmax_scale, float p_dropout, bool has_leftpad, int num_splits = 0) {
    if (!mode.enabled) { return 0; }
    if (p_dropout > 0.f) {
        host.warn(host.context,
            "flash_attn: deterministic mode does not cover dropout, whose random numbers come from a "
            "row's place in the batch; calls with dropout_p > 0 run as if the mode were off.");
        return 0;
    }
    if (has_leftpad) {
        host.warn(host.context,
            "flash_attn: deterministic mode does not cover leftpad_k: the bits of a row may depend on its "
            "padding.");
    }
    if (num_splits > 0) {
        host.warn(host.context,
            "flash_attn: in deterministic mode split_size decides where keys are split; num_splits was not "
            "used.");
    }
    FORK_CHECK_VALUE(softmax_scale > 0.f, "deterministic mode: softmax_scale=", softmax_scale,
        " is not greater than 0; keys are folded by "
        "the maxima of their scores, which it must not turn around.");
    const int n = fork_keys::tile(head_size);
    FORK_CHECK_VALUE(mode.split_size % n == 0, "deterministic mode: split_size=", mode.split_size,
        " is not a multiple of ", n, ", the kBlockN of the head_dim ", head_size,
        " kernels; valid values are ", n, ", ", 2 * n, ", ", 3 * n,
        ", … (set_deterministic_mode(split_size=…) or FA2_SPLIT_SIZE).");
    return mode.split_size;
}

// Whether thread blocks walk all chunks of their rows and fold them (ChunkFold), rather than one chunk each
// for fork_combine_kernel to fold. The bits are the same. One block does where there are enough of them for
// the GPU (upstream's measure for not splitting), if shared memory has room for the running result.
inline bool one_block_walks(int head_size, int num_chunks, int64_t num_blocks, int num_slots) {
    if (num_chunks == 1) { return true; }
    if (fork_occupancy::split_smem(fork_kernels::head_dim_of(head_size))
        > device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)) {
        return false;
    }
    const int paths = fork_mode::test_paths();
    if (paths & (fork_mode::kOneBlock | fork_mode::kApart | fork_mode::kStandard)) {
        return !(paths & fork_mode::kApart);
    }
    return fork_occupancy::fills(num_blocks, num_slots);
}

// Whether the rows of the heads of a group share tiles (fork_group.h), whose chunks then spread. With more
// queries little is gained. What asks for a row's head (slopes, masks, biases) or place among queries
// (rotations) is not built for it. `one_block` says whether thread blocks would walk all chunks otherwise:
// with a window, most thread blocks of chunks would find no key.
inline bool shares_tiles(const Flash_fwd_params &params, bool one_block) {
    constexpr int kMostQueries = 16;
    const int paths = fork_mode::test_paths();
    if (paths & (fork_mode::kOneBlock | fork_mode::kStandard | fork_mode::kOwnTiles)) { return false; }
    if (params.alibi_slopes_ptr != nullptr || params.fork.scores.any() || params.rotary_dim > 0
        || params.leftpad_k != nullptr) {
        return false;
    }
    const bool has_window =
        !params.is_causal && (params.window_size_left >= 0 || params.window_size_right >= 0);
    return params.h_h_k_ratio > 1 && params.seqlen_q <= kMostQueries && params.fork.num_chunks > 1
        && !(one_block && has_window);
}

// Upstream's tiles on compute capability 8.6 and 8.9.
inline bool has_other_tiles(int head_dim) {
    return (head_dim == 96 || head_dim == 128) && device_attribute(cudaDevAttrComputeCapabilityMajor) == 8
        && device_attribute(cudaDevAttrComputeCapabilityMinor) > 0;
}

// Whether flash_fwd_kernel runs this call, 128 rows to a thread block: upstream's where the keys fit one
// chunk, else the one that walks several, if as many thread blocks of it fit a multiprocessor as of
// upstream's, and there are enough for the GPU. Ask when params are whole.
inline bool standard(const Flash_fwd_params &params, int num_slots) {
    if (params.num_splits > 1 || params.knew_ptr != nullptr || params.block_table != nullptr
        || params.leftpad_k != nullptr) {
        return false;
    }
    const int head_dim = fork_kernels::head_dim_of(params.d);
    if (!fork_kernels::has(fork_kernels::Pass::fwd, head_dim, params.is_bf16, params.is_causal)) {
        return false;
    }
    if (has_other_tiles(head_dim)) { return false; }
    const int paths = fork_mode::test_paths();
    if (paths & (fork_mode::kOneBlock | fork_mode::kApart)) { return false; }
    if (!needs_walking(params)) { return true; }
    const bool bounded = params.window_size_left >= 0 || params.window_size_right >= 0;
    if (params.d != head_dim || params.alibi_slopes_ptr != nullptr || params.softcap > 0.f
        || (bounded && !params.is_causal)) {
        return false;
    }
    const int blocks = fork_occupancy::standard_blocks(head_dim);
    if (!fork_occupancy::fit(blocks, fork_occupancy::standard_smem(head_dim, /*walks=*/true))) {
        return false;
    }
    const int64_t num_blocks = int64_t(params.b) * params.h * ((params.seqlen_q + 127) / 128);
    return (paths & fork_mode::kStandard)
        || (params.seqlen_q > 64 && fork_occupancy::fills(num_blocks, num_slots / 2 * blocks));
}

// What a call's scratch may take, in bytes, by what it works on: half of the queries, the result, and the
// keys and values of one sequence of the longest length. So slices are few and have rows enough for the GPU.
// At least 64 MiB.
inline int64_t usual_scratch(const Flash_fwd_params &params) {
    if (fork_mode::test_scratch() > 0) { return fork_mode::test_scratch(); }
    const int64_t rows =
        params.cu_seqlens_q == nullptr ? int64_t(params.b) * params.seqlen_q : params.total_q;
    const int64_t queries = rows * params.h * params.d,
                  keys = int64_t(params.seqlen_k) * params.h_k * params.d;
    // Half of: q, out, k and v, of two bytes an element
    return std::max((2 * queries + 2 * keys) * 2 / 2, int64_t(64) << 20);
}

// What the accumulators of chunks may take in any case: the longest length that a call names may be far above
// what there is. A slice of so much is work enough for any GPU.
inline int64_t most_scratch() {
    const int64_t of_test = fork_mode::test_scratch();
    return of_test > 0 ? of_test : int64_t(512) << 20;
}

// Whether thread blocks of so many rows fold their chunks in turns (fork_in_turns.h), rather than leave them
// in memory. Some are at work for the same rows at once. They wait for each other at first, and at each fold
// where a chunk takes less time than the folds of all. On an H100 turns took less time than memory where
// chunks are so many and so long. Tiles that are half empty are folded whole, though.
inline bool in_turns(const Flash_fwd_params &params, int block_rows, int64_t row_blocks, int num_slots) {
    if (params.fork.n_blocks_per_split == 0) { return false; }
    const int64_t bytes = row_blocks * block_rows * (2 * params.d_rounded + 4) * sizeof(float);
    if (bytes > usual_scratch(params)
        || row_blocks * params.fork.num_chunks > std::numeric_limits<int>::max()) {
        return false;
    }
    const int paths = fork_mode::test_paths();
    if (paths & (fork_mode::kInTurns | fork_mode::kApart)) { return paths & fork_mode::kInTurns; }
    if (params.seqlen_q * params.fork.group <= fork_in_turns::kRows / 2) { return false; }
    const int chunks = fork_in_turns::walked(block_rows), num_walks = params.fork.num_chunks / chunks;
    // Both in keys times head dim: what a thread block walks before its turn, and what others walk while it
    // folds. With less than 30 for pairs, an H200 took 1.04 times as long at split 512 as in tiles of 64
    // rows.
    const int64_t walk =
        int64_t(chunks) * params.fork.n_blocks_per_split * fork_keys::tile(params.d) * params.d_rounded;
    const int64_t fold = (chunks == 1 ? 24 : 30) << 10;
    const int64_t at_work = (num_slots + row_blocks - 1) / row_blocks;
    return 4 * walk >= fold * at_work && num_walks >= 6 * at_work
        && num_walks * walk >= 3 * fold * at_work * at_work;
}

// Whether thread blocks that fold in turns may be tall: as in the standard kernels, 128 rows share what is
// loaded of keys. Registers have room for them up to head dim 64, and for nothing that few calls ask for. At
// most an eighth of the longest sequence's rows is empty for it.
inline bool may_be_tall(const Flash_fwd_params &params) {
    const int tiles = (params.seqlen_q + fork_in_turns::kRows - 1) / fork_in_turns::kRows;
    const bool bounded = params.window_size_left >= 0 || params.window_size_right >= 0;
    return params.d == fork_kernels::head_dim_of(params.d) && params.d <= 64 && params.fork.group == 1
        && (tiles % 2 == 0 || tiles > 8) && params.fork.num_chunks > 2 && params.knew_ptr == nullptr
        && params.block_table == nullptr && params.alibi_slopes_ptr == nullptr && params.softcap == 0.f
        && !params.fork.scores.any() && (params.is_causal || !bounded)
        && !(fork_mode::test_paths() & fork_mode::kWide)
        && fork_occupancy::two_fit(fork_occupancy::tall_smem(params.d));
}

// The rows of thread blocks that fold in turns; 0 where none do. Ask when num_chunks is known.
inline int rows_in_turns(const Flash_fwd_params &params, int num_heads, int rows_of_head, int num_slots) {
    const auto fold = [&](int block_rows) {
        const int64_t row_blocks =
            fork_in_turns::row_blocks(int64_t(params.b) * num_heads, rows_of_head, block_rows);
        return in_turns(params, block_rows, row_blocks, num_slots);
    };
    if (may_be_tall(params) && fold(fork_in_turns::kTallRows)) { return fork_in_turns::kTallRows; }
    return fold(fork_in_turns::kRows) ? fork_in_turns::kRows : 0;
}

// What of a call with several splits shares scratch at once: all of it where the mode is off, as upstream.
inline fork_slices::Slice slice(
    const Flash_fwd_params &params, int batch_size, int num_heads, int max_seqlen_q, int head_size_rounded) {
    if (params.fork.n_blocks_per_split == 0) {
        return {batch_size, num_heads, max_seqlen_q, params.num_splits};
    }
    const int64_t bytes_per_split = head_size_rounded * sizeof(float);
    return fork_slices::largest(batch_size, num_heads, max_seqlen_q, params.num_splits, bytes_per_split,
        std::min(usual_scratch(params), most_scratch()), most_scratch());
}

inline void set_windows(Flash_fwd_params &params, int window_size_left, int window_size_right) {
    // A side without a bound, where some row may have keys on that side, gets none. Upstream writes the
    // call's longest key length instead, which lets a neighbour's length into a row's arithmetic.
    if (window_size_left >= 0 || window_size_right >= 0) {
        params.window_size_left = window_size_left < 0 ? fork_window::kUnbounded
                                                       : std::min(window_size_left, fork_window::kUnbounded);
        params.window_size_right = window_size_right < 0
            ? fork_window::kUnbounded
            : std::min(window_size_right, fork_window::kUnbounded);
    }
}

// Call after core::set_params, with the windows as the caller gave them.
inline void set_params(
    Flash_fwd_params &params, int split_size, int window_size_left, int window_size_right) {
    if (split_size == 0) { return; }
    params.fork.n_blocks_per_split = split_size / fork_keys::tile(params.d);
    params.fork.no_even_MN = fork_mode::test_paths() & fork_mode::kUneven;
    set_windows(params, window_size_left, window_size_right);
}

}  // namespace fork_split
}  // namespace FLASH_NAMESPACE

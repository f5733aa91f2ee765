// How much shared memory a fold takes, and when a call fills the GPU: for the host, which chooses kernels by
// it, and for the kernels, which are checked against it where they are compiled.

#pragma once

#include <cstddef>
#include <cstdint>

#include "namespace_config.h"
#include "fork_keys.h"
#include "fork_runtime.h"

namespace FLASH_NAMESPACE {
namespace fork_occupancy {

// Whether there are enough thread blocks for the GPU: upstream's measure for not splitting.
inline bool fills(const int64_t num_blocks, const int num_slots) { return num_blocks >= 0.8f * num_slots; }

// Of a split kernel that walks several chunks: Q, K and V, the accumulators in float32, and each row's max
// and sum. 64 rows to a thread block.
constexpr int split_smem(const int head_dim) {
    return (64 + 2 * fork_keys::tile(head_dim)) * head_dim * 2 + 64 * head_dim * 4 + 64 * 8;
}

// Of one whose chunks fold in turns, 128 rows to a thread block: it holds a chunk's result.
constexpr int tall_smem(const int head_dim) {
    return (128 + 2 * fork_keys::tile(head_dim)) * head_dim * 2 + 128 * head_dim * 4 + 128 * 8;
}

// Thread blocks of flash_fwd_kernel, of 128 rows each, that the registers of a multiprocessor suffice for:
// above head dim 128 they have 8 warps, not 4.
constexpr int standard_blocks(const int head_dim) { return head_dim <= 128 ? 2 : 1; }

// How many quarters of a running result flash_fwd_kernel has in shared memory. Those that leave room for two
// thread blocks; where there is one anyhow, two. The rest lies in the output's rows (ChunkRest), which hold
// two at most.
constexpr int shared_quarters(const int head_dim, const int tiles, const int acc) {
    if (standard_blocks(head_dim) == 1) { return 2; }
    return tiles + acc <= 112 * 1024 ? 4 : 3;
}

// Of flash_fwd_kernel, whether it walks several chunks or one.
constexpr int standard_smem(const int head_dim, const bool walks) {
    const int tiles = (128 + 2 * fork_keys::step(head_dim)) * head_dim * 2, acc = 128 * head_dim * 4;
    return tiles + (walks ? acc / 4 * shared_quarters(head_dim, tiles, acc) + 128 * 8 : 0);
}

// Whether a multiprocessor has room for so many thread blocks; each takes a KiB besides.
inline bool fit(const int blocks, const size_t smem) {
    return blocks * (smem + 1024) <= size_t(device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
}
inline bool two_fit(const size_t smem) { return fit(2, smem); }

// How many tiles of so many bytes of each query's own mask shared memory holds at once, beside what the
// kernel needs.
inline int mask_slots(const size_t besides, const size_t tile) { return two_fit(besides + 4 * tile) ? 4 : 2; }

}  // namespace fork_occupancy
}  // namespace FLASH_NAMESPACE

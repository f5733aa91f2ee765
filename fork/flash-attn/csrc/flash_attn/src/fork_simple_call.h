// Which calls with attn_mask or attn_bias take flash_fwd_kernel.

#pragma once

#include "namespace_config.h"
#include "flash.h"
#include "fork_bias.h"
#include "fork_walking.h"
#include "fork_kernel_set.h"
#include "fork_keys.h"
#include "fork_occupancy.h"
#include "fork_split.h"

namespace FLASH_NAMESPACE {
namespace fork_bias {

// Whether nothing in a mask or a bias keeps a call from it: simple ones have a kernel there, with 128 rows to
// a thread block. They take it where two blocks fit a multiprocessor and there are enough for the GPU, as
// fork_split::standard has it. In deterministic mode rows have the same bits elsewhere.
inline bool standard(const Flash_fwd_params &params, const int num_slots) {
    const Params &scores = params.fork.scores;
    if (!scores.any()) { return true; }
    const int head_dim = fork_kernels::head_dim_of(params.d), n = fork_keys::step(head_dim);
    if (!kBuilt || !is_simple(params) || params.d != head_dim || head_dim > 128) { return false; }
    if (!fork_kernels::has(fork_kernels::Pass::fwd, head_dim, params.is_bf16, params.is_causal)) {
        return false;
    }
    if (fork_split::has_other_tiles(head_dim)) { return false; }
    const int with_bias = fork_occupancy::standard_smem(head_dim, needs_walking(params))
        + (scores.bias.ptr == nullptr ? 0 : 128 * n * 2);
    const int slots = is_shared(scores.mask) ? 0 : fork_occupancy::mask_slots(with_bias, 128 * n);
    if (!fork_occupancy::two_fit(with_bias + slots * 128 * n)) { return false; }
    const int64_t num_blocks = int64_t(params.b) * params.h * ((params.seqlen_q + 127) / 128);
    return scores.rows == 128
        || (scores.rows == 0 && params.seqlen_q > 64 && fork_occupancy::fills(num_blocks, num_slots));
}

}  // namespace fork_bias
}  // namespace FLASH_NAMESPACE

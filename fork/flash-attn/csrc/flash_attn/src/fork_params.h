// What our kernels are told beside upstream's parameters. Upstream's structs hold these by a line each, so
// that a field of theirs which comes to have a name of ours changes nothing.

#pragma once

#include <cstdint>

#include "namespace_config.h"
#include "fork_bias.h"
#include "fork_in_turns.h"
#include "fork_sink.h"
#include "fork_slices.h"

namespace FLASH_NAMESPACE {

struct Fork_fwd_params {
    // Chunks of keys. The first is 0 where the mode is off: upstream cuts keys then, by num_splits.
    int n_blocks_per_split;  // the extent of a chunk, in blocks of kBlockN keys
    int num_chunks;   // that reach the call's longest key length; where num_splits is 1, a thread block walks
                      // all
    bool no_even_MN;  // for tests: take the general path also where the lengths fill their tiles
    bool tall_turns;  // thread blocks that fold in turns have 128 rows
    uint16_t wait_limit;  // of those: fork_turn.h

    // Of a call with several splits: what its scratch holds at once, what one slice's chunks leave to the
    // next, and turns, if they fold in turns
    fork_slices::Slice slice;
    fork_slices::Carried carried;
    fork_in_turns::Turns turns;

    int group;  // heads whose rows share tiles (fork_group.h), and keys: h_h_k_ratio is then 1; 1: none do
    int page_shift;   // of pages smaller than a tile: all steps are multiples of 2^page_shift elements
    int rotary_rows;  // of the tables of rotations
    int packed_rows;  // of packed queries, of which those of no sequence get zeros; 0: none do

    fork_bias::Params scores;  // attn_mask and attn_bias
    fork_sink::Sink sink;      // learnable_sink
};

struct Fork_bwd_params {
    int total_k;     // of packed calls
    int wait_limit;  // fork_turn.h

    // Deterministic mode: whose turn it is to add to a block of dQ, and which thread block is next; else null
    int *dq_turns;
    int *dq_ticket;               // behind it, whether a thread block gave up waiting (fork_turn.h)
    int dq_together, dq_periods;  // how thread blocks walk (fork_order.h)
    int64_t dq_turns_head_stride;

    fork_bias::Gradient bias_gradient;

    const float *lse_gradient;  // of a loss on softmax_lse, which lies as that does; null: there is none
};

}  // namespace FLASH_NAMESPACE

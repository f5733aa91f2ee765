// FA2_CHECK=1: what is in a call's tables, which only the GPU can see.

#pragma once

#include "namespace_config.h"
#include "host.h"
#include "tensor.h"

namespace FLASH_NAMESPACE {
namespace core {

// Each is checked where it is given. Lengths of -1 are not known.
struct Tables {
    Tensor cu_seqlens_q, cu_seqlens_k;  // begin at 0, never fall, end within the totals
    int64_t total_q = -1, total_k = -1;
    Tensor lengths;  // of keys in use: from 0 to the capacity
    const char *lengths_name = "";
    int64_t capacity = -1;
    int64_t new_keys = 0;    // which are appended, and must fit too
    Tensor cache_batch_idx;  // from 0 to the cache's sequences
    int64_t sequences = -1;
    Tensor block_table;  // pages that a sequence's length reaches: from 0 to the pool's
    int64_t pages = -1, page_size = 0;
};

// Waits for the stream; where a CUDA graph captures it, warns instead. A ValueError names the first value
// that is wrong.
void check_values(const Tables &tables, Scratch &scratch, const Host &host);

}  // namespace core
}  // namespace FLASH_NAMESPACE

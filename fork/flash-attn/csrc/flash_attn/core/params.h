// The parameters of kernels, from a call: upstream's set_params_fprop and set_params_dgrad.

#pragma once

#include <algorithm>
#include <cstdint>

#include "namespace_config.h"
#include "call.h"
#include "flash.h"
#include "fork_window.h"

namespace FLASH_NAMESPACE {
namespace core {

// Kernels count tokens in 32 bits, and tiles past the last one. With a window they add its sides to them.
constexpr int64_t kMostTokens = INT32_MAX - 1023, kMostTokensOfWindow = fork_window::kUnbounded - 1024;

inline bool has_window(const Options &call) {
    return call.window_left >= 0 || (call.window_right > 0 && !call.causal);
}

// That kernels count so many tokens of two tensors, where so many of each may be one sequence's.
void refuse_tokens(const Options &call, const char *name, int64_t tokens, int64_t of_sequence);
inline void check_tokens(const Options &call, const char *q_name, int64_t q_tokens, int64_t q_of_sequence,
    const char *k_name, int64_t k_tokens, int64_t k_of_sequence) {
    if (std::max(q_tokens, k_tokens) <= kMostTokensOfWindow) { return; }
    refuse_tokens(call, q_name, q_tokens, q_of_sequence);
    refuse_tokens(call, k_name, k_tokens, k_of_sequence);
}

// That a grid of thread blocks has room for so many sequences and heads.
void check_grid(int64_t b, int64_t h);

// A length that a call names, which may be far above what there is: as far as kernels count. `reach`: what a
// sequence can have.
inline int named_length(const Options &call, int64_t length, int64_t reach) {
    return int(std::min({length, reach, has_window(call) ? kMostTokensOfWindow : kMostTokens}));
}

inline int rounded(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
inline int rounded_head_dim(int head_dim) { return rounded(head_dim, head_dim <= 128 ? 32 : 64); }

// Where rows of a tensor lie. Strides in elements.
struct Rows {
    void *data;
    int64_t batch, row, head;
};

// Of (b, rows, h, d), or of packed (rows, h, d), which have no batch.
inline Rows rows_of(const Tensor &tensor) {
    return {tensor.data, tensor.dims == 4 ? tensor.stride(0) : 0, tensor.stride(-3), tensor.stride(-2)};
}

// The heads of a group as rows of one head, for a single query of a sequence: of (b, 1, h, d), or of packed
// (b, h, d).
inline Rows groups_as_rows(const Tensor &tensor, int groups) {
    return {tensor.data, tensor.stride(0), tensor.stride(-2), tensor.stride(-2) * groups};
}

struct Sizes4 {
    int b, seqlen_q, seqlen_k, h, h_k, d;
};

// How a row's scores are made, but for masks and biases. The windows are the caller's, or without a bound
// that no key is past.
void set_params(Flash_fwd_params &params, const Options &call, const Sizes4 &sizes, bool is_bf16,
    const Rows &q, const Rows &k, const Rows &v, const Rows &out, float *lse);

void set_alibi(Flash_fwd_params &params, const Options &call);

// Where swapped, the heads of a group have been made the rows of one head.
void set_sink(Flash_fwd_params &params, const Options &call, bool swapped);

// That this build has a kernel for a head dim and dtype: backward, or forward of either kind.
void check_kernels(const Tensor &q, bool backward);

// How many packed sequences there are.
int64_t sequences(const Tensor &cu_seqlens_q);

// Checks that calls of all kinds have in common.
void check_options(const Options &call);
void check_heads(const Options &call, Device device, int64_t b, int64_t h, int64_t h_k, int64_t d);
// q's dtype, and that the others have it.
void check_dtypes(const Tensor &q, std::initializer_list<std::pair<const char *, const Tensor *>> others);

}  // namespace core
}  // namespace FLASH_NAMESPACE

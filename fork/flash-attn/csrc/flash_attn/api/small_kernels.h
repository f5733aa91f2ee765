// Kernels for what the interface has and the core does not: log-sum-exps in half, head dims without kernels,
// and dropout's random state of a backward call.

#pragma once

#include <cstdint>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "namespace_config.h"
#include "api/flash_attention_v2_c.h"
#include "fork_runtime.h"  // PhiloxState

namespace FLASH_NAMESPACE {
namespace api {

// Whether the current device has code in this build: cudaSuccess, or why not.
cudaError_t find_code();

void to_half(const float *from, half *to, int64_t count, cudaStream_t stream);
void to_float(const half *from, float *to, int64_t count, cudaStream_t stream);

// Copies float16 rows, (b, s, h, d) of any strides. Where to's rows are longer, zeros follow.
void copy_rows(
    const flash_attention_v2_tensor &from, const flash_attention_v2_tensor &to, cudaStream_t stream);

// A sink of any dtype and stride, as float32 one behind the other.
void to_floats(const void *sink, flash_attention_v2_dtype dtype, int64_t stride, float *to, int64_t heads,
    cudaStream_t stream);

// joined = log(exp(lse) + exp(sink)), of (..., heads, rows); +inf, of rows that see no key, stays.
void join_sink(const float *lse, const float *sink, float *joined, int64_t rows, int64_t heads, int64_t count,
    cudaStream_t stream);

// Where rows of a log-sum-exp and of the backward pass's sums lie.
struct SinkRows {
    const int *cu_seqlens;  // of packed sequences, else null
    int64_t sequences;
    int64_t rows;  // of a log-sum-exp: of a sequence, or of all packed ones
    int64_t sums;  // of the sums: the same, with what follows each sequence
};

// Of each head: minus the sink's weight in a row times the row's sum of dout * out, over all rows that see a
// key, in one order.
void sink_gradient(float *gradient, const float *sink, const float *lse, const float *sums,
    const SinkRows &rows, int64_t heads, cudaStream_t stream);

// Writes seed and offset to where a backward kernel reads them.
void put_random_state(uint64_t *at, const PhiloxState &state, cudaStream_t stream);

}  // namespace api
}  // namespace FLASH_NAMESPACE

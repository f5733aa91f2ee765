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

// Writes seed and offset to where a backward kernel reads them.
void put_random_state(uint64_t *at, const PhiloxState &state, cudaStream_t stream);

}  // namespace api
}  // namespace FLASH_NAMESPACE

// Kernels for what a framework would do around attention: constants, and sums in a fixed order.

#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "namespace_config.h"
#include "tensor.h"

namespace FLASH_NAMESPACE {
namespace core {

// A float16, bfloat16 or float32 tensor of up to four dimensions, anywhere in memory.
void fill(const Tensor &tensor, float value, cudaStream_t stream);

// Sums of the heads of each group, in float32 and in the heads' order. heads: (…, h, d), contiguous; sum:
// (…, h_k, d), anywhere.
void sum_groups(const Tensor &sum, const void *heads, int num_heads, cudaStream_t stream);

// Adds parts of the same shape, float32 and one behind the other: halves to halves, so in an order that
// follows from their number alone. Parts are overwritten. sum: contiguous.
void sum_parts(const Tensor &sum, float *parts, int num_parts, cudaStream_t stream);

}  // namespace core
}  // namespace FLASH_NAMESPACE

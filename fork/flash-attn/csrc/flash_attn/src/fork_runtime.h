// What kernels need of a framework, without one: how a CUDA error is reported, and dropout's random state.
//
// Kernel files include no torch, so one object serves every torch and Python. The host code that is linked
// with them reports errors and fills the random state.

#pragma once

#include <cstdint>
#include <cstdio>  // this and the next: upstream's headers have them by way of torch's
#include <cstdlib>
#include <tuple>

#include <cuda_runtime.h>

#include "namespace_config.h"

namespace FLASH_NAMESPACE {

// Raises an error unless status is cudaSuccess. The host code defines it.
void check_cuda(cudaError_t status, const char *file, const char *function, int line);

// Of the current device, which is asked once. The host code defines it.
int device_attribute(cudaDeviceAttr attribute);

// Seed and offset of the Philox generator: values, or, within a CUDA graph capture, where a replay finds
// them.
struct PhiloxState {
    uint64_t seed = 0, offset = 0;
    const int64_t *seed_ptr = nullptr, *offset_ptr = nullptr;
    uint64_t offset_intragraph = 0;
};

__host__ __device__ __forceinline__ std::tuple<uint64_t, uint64_t> unpack(const PhiloxState &state) {
    return state.seed_ptr == nullptr
        ? std::make_tuple(state.seed, state.offset)
        : std::make_tuple(uint64_t(*state.seed_ptr), uint64_t(*state.offset_ptr) + state.offset_intragraph);
}

}  // namespace FLASH_NAMESPACE

#ifdef __CUDACC__  // kernel files alone
#define C10_CUDA_CHECK(EXPR) ::FLASH_NAMESPACE::check_cuda(EXPR, __FILE__, __func__, __LINE__)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
#endif

// In the place of torch's header of this name, and the last that flash_api.cpp includes of torch's.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/PhiloxCudaState.h>

namespace at {
struct CUDAGeneratorImpl : CPUGeneratorImpl {
    using CPUGeneratorImpl::CPUGeneratorImpl;
    PhiloxCudaState philox_cuda_state(uint64_t increment) {
        const PhiloxCudaState state(current_seed(), offset_);
        offset_ += (increment + 3) / 4 * 4;
        return state;
    }

private:
    uint64_t offset_ = 0;
};
namespace cuda::detail {
inline const Generator &getDefaultCUDAGenerator() {
    static const Generator generator = make_generator<CUDAGeneratorImpl>(uint64_t(1));
    return generator;
}
}  // namespace cuda::detail
}  // namespace at

// flash_api.cpp asks whether tensors are on the device and makes some there: here that is ordinary memory.
#define is_cuda is_cpu
#define kCUDA kCPU

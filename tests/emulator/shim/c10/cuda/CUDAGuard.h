// In the place of torch's header of this name: tensors lie in ordinary memory, and there is one device.
#pragma once
#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

namespace at::cuda {
struct CUDAGuard {
    explicit CUDAGuard(c10::Device) {}
};
}  // namespace at::cuda

namespace c10::cuda {
inline void c10_cuda_check_implementation(cudaError_t status, const char *file, const char *function, int line, bool) {
    if (status == cudaSuccess) { return; }
    const std::string message = cudaGetErrorString(status);
    cudaGetLastError();
    TORCH_CHECK(false, "emulated CUDA error: ", message, " (", file, ":", line, ", ", function, ")");
}
}  // namespace c10::cuda

// A program with a CUDA runtime of its own, which counts. It calls the library twice, and prints what each call asked.
//
//     launches [refuses | has-no-code]

#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <flash_attention_v2_c.h>

namespace {
std::map<std::string, int> asked;
bool refuses = false, has_code = true;

CUresult driver_launch() {
    ++asked["cuLaunchKernel"];
    return refuses ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

flash_attention_v2_tensor array(void *data) {
    return {data, FLASH_ATTENTION_V2_FLOAT16, 4, {1, 32, 4, 64}, {32 * 4 * 64, 4 * 64, 64, 1}};
}
}  // namespace

extern "C" {
cudaError_t cudaGetDevice(int *device) {
    ++asked["cudaGetDevice"];
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    ++asked["cudaDeviceGetAttribute"];
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
        : attribute == cudaDevAttrMultiProcessorCount       ? 132
        : attribute == cudaDevAttrComputeCapabilityMinor    ? 0
                                                            : 227 << 10;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
    ++asked["cudaFuncSetAttribute"];
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, const void *) { return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *) {
    *attributes = {};
    attributes->type = cudaMemoryTypeDevice;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **place, size_t) {
    static char memory;
    *place = &memory;
    return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *, void **found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult *) {
    *found = reinterpret_cast<void *>(&driver_launch);
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(void **kernel, void *host) {
    *kernel = host;
    return has_code ? cudaSuccess : cudaErrorNoKernelImageForDevice;
}
cudaError_t __cudaLaunchKernel(void *, dim3, dim3, void **, size_t, cudaStream_t) {
    ++asked["cudaLaunchKernel"];
    return cudaSuccess;
}
}

int main(int, char **arguments) {
    const char *how = arguments[1] == nullptr ? "" : arguments[1];
    refuses = std::strcmp(how, "refuses") == 0;
    has_code = std::strcmp(how, "has-no-code") != 0;
    static char memory[32 * 4 * 64 * 2];
    flash_attention_v2_forward_call call;
    flash_attention_v2_forward_defaults(&call, sizeof call);
    call.options.causal = 1;
    call.q = call.k = call.v = call.out = array(memory);
    alignas(256) static char workspace[1024];
    call.workspace = workspace;
    call.workspace_size = sizeof workspace;
    for (int turn = 0; turn < 2; ++turn) {
        asked.clear();
        if (flash_attention_v2_run_forward(&call, nullptr) != cudaSuccess) {
            std::puts(flash_attention_v2_last_error());
            return 1;
        }
        for (const auto &[name, count] : asked) { std::printf("%s=%d ", name.c_str(), count); }
        std::puts("");
    }
}

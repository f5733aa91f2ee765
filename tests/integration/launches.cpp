// A program with a CUDA runtime of its own, of two GPUs, which counts. It calls the core as flash_attn_2_cuda
// does.
//
//     launches [refuses | has-no-code]  two calls on each GPU; a line for each says what it asked of CUDA
//     launches nested                   a call whose warning calls the core on the other GPU; a line says
//     what was asked

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include "core/bound.h"

namespace core = flash::core;
namespace ffi = tvm::ffi;

extern "C" int __tvm_ffi_fwd(void *, const TVMFFIAny *, int32_t, TVMFFIAny *);

namespace {
std::map<std::string, int> asked;
int current = 0;
bool refuses = false, has_code = true;

std::string on_current(const char *what) { return what + ("-on-" + std::to_string(current)); }

CUresult driver_launch(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
    CUstream, void **, void **) {
    ++asked[on_current("cuLaunchKernel")];
    return refuses ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}
}  // namespace

extern "C" {
cudaError_t cudaGetDevice(int *device) {
    ++asked["cudaGetDevice"];
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    ++asked["cudaSetDevice"];
    current = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    ++asked["cudaDeviceGetAttribute-of-" + std::to_string(device)];
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
        : attribute == cudaDevAttrComputeCapabilityMinor    ? 0
        : attribute == cudaDevAttrMultiProcessorCount       ? 132
                                                            : 227 << 10;  // shared memory
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
    ++asked["cudaFuncSetAttribute"];
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
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
cudaError_t __cudaGetKernel(void **kernel, const void *host) {
    *kernel = const_cast<void *>(host);
    return has_code ? cudaSuccess : cudaErrorNoKernelImageForDevice;
}
cudaError_t __cudaLaunchKernel(void *, dim3, dim3, void **, size_t, cudaStream_t) {
    ++asked[on_current("cudaLaunchKernel")];
    return cudaSuccess;
}
}

namespace {
// Four chunks of keys, which one thread block folds: kernel files ask for the GPU's attributes.
core::Forward call_on(int gpu) {
    static char memory;
    core::Forward call;
    call.causal = true;
    call.split_size = 128;
    const auto tensor = [&](int64_t rows) {
        core::Tensor given;
        given.data = &memory;
        given.dtype = core::Dtype::fp16;
        given.device = {true, gpu};
        given.dims = 4;
        const int64_t sizes[] = {1, rows, 256, 64}, strides[] = {rows * 256 * 64, 256 * 64, 64, 1};
        std::copy_n(sizes, 4, given.sizes);
        std::copy_n(strides, 4, given.strides);
        return given;
    };
    call.q = call.out = tensor(128);
    call.k = call.v = tensor(512);
    return call;
}

void *scratch(void *, size_t) {
    static char memory;
    return &memory;
}

void tell_warnings(const ffi::String &) {
    cudaSetDevice(1);
    core::run(call_on(1), {nullptr, nullptr, scratch, nullptr});
    ++asked[on_current("afterwards")];
    cudaSetDevice(0);
}

// On GPU 0, with dropout, for which keys are not split: of that the core warns.
void run_through_the_binding() {
    ffi::reflection::GlobalDef().def("flash_attn.warn", tell_warnings);
    static int64_t state[2], sizes[] = {1, 32, 4, 64}, strides[] = {32 * 4 * 64, 4 * 64, 64, 1};
    const auto tensor = [](int dims, DLDataType dtype) {
        return DLTensor{state, {kDLCUDA, 0}, dims, dtype, sizes, strides, 0};
    };
    DLTensor all = tensor(4, {kDLFloat, 16, 1}), rng_state = tensor(1, {kDLInt, 64, 1});
    ffi::Function::FromExternC(nullptr, __tvm_ffi_fwd, nullptr)(&all, &all, &all, &all, nullptr, nullptr,
        nullptr, nullptr, 0.5, 0.125, true, -1, -1, 0., 128, 0, nullptr, &rng_state, 0, 0, nullptr, nullptr,
        nullptr);
}

void tell() {
    for (const auto &[name, count] : asked) { std::printf("%s=%d ", name.c_str(), count); }
    std::puts("");
    asked.clear();
}
}  // namespace

int main(int, char **arguments) {
    const std::string how = arguments[1] == nullptr ? "" : arguments[1];
    refuses = how == "refuses";
    has_code = how != "has-no-code";
    if (how == "nested") {
        run_through_the_binding();
        tell();
        return 0;
    }
    for (int gpu : {0, 1, 0, 1}) {
        core::run(call_on(gpu), {nullptr, nullptr, scratch, nullptr});
        tell();
    }
}

// What a call gets from the program around it: a stream, scratch memory and a place for warnings.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <cuda_runtime.h>

#include "namespace_config.h"
#include "core/error.h"
#include "fork_runtime.h"  // check_cuda

namespace FLASH_NAMESPACE {
namespace core {

// Of a framework, or of the CUDA runtime.
struct Host {
    cudaStream_t stream;
    void *context;  // handed to the functions below
    // Memory on the call's GPU that kernels of the stream may use until the call returns, and, in stream
    // order, after; null where there is none.
    void *(*allocate)(void *context, size_t bytes);
    // Tells the user, each text once.
    void (*warn)(void *context, const char *text);
    // Where this is given, nothing is launched: the bytes of scratch that the call takes are added to it.
    size_t *measured = nullptr;
};

// The scratch of a call, which is one allocation: reserve all, allocate, then ask where each part is.
class Scratch {
public:
    size_t reserve(int64_t bytes) {
        const size_t begin = total_;
        total_ += (size_t(bytes) + kAlignment - 1) / kAlignment * kAlignment;
        return begin;
    }
    void allocate(const Host &host) {
        if (host.measured != nullptr) {
            *host.measured += total_;
            return;
        }
        if (total_ == 0) { return; }
        base_ = static_cast<char *>(host.allocate(host.context, total_));
        FORK_CHECK_AS(memory, base_ != nullptr, "no memory for ", total_, " bytes of scratch");
    }
    template<typename T = void>
    T *at(size_t begin) const {
        return reinterpret_cast<T *>(base_ + begin);
    }

private:
    static constexpr size_t kAlignment = 256;
    size_t total_ = 0;
    char *base_ = nullptr;
};

// Makes a GPU the current one for as long as it lives.
class OnGpu {
public:
    explicit OnGpu(int index);
    ~OnGpu();
    OnGpu(const OnGpu &) = delete;
    OnGpu &operator=(const OnGpu &) = delete;

private:
    int before_;
    bool changed_;
    int outer_;  // that of an OnGpu around this one; -1: there is none
};

// The status of the last error of CUDA's that this thread raised, or success; and forgets it.
cudaError_t take_raised();

// What is asked once of each GPU.
struct GpuFacts {
    int major, minor, multiprocessors;
};
const GpuFacts &gpu_facts();  // of the current one

}  // namespace core
}  // namespace FLASH_NAMESPACE

#define FORK_CHECK_CUDA(EXPR) ::FLASH_NAMESPACE::check_cuda(EXPR, "flash_attn/core", __func__, __LINE__)

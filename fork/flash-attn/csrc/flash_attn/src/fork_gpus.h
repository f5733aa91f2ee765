// Which GPUs the machine code of this build runs on, so that kernels that none of them chooses are not
// compiled.
//
// A build that knows defines FORK_ARCHITECTURES as a bit mask of what it makes machine code for, and makes no
// PTX; bit i stands for the i-th compute capability below. Undefined means any.

#pragma once

#include <cuda_runtime.h>

#include "fork_runtime.h"
#include "namespace_config.h"

#ifndef FORK_ARCHITECTURES
#define FORK_ARCHITECTURES 0xfff
#endif

namespace FLASH_NAMESPACE {
namespace fork_gpus {

struct Gpu {
    int major, minor;
    // KiB at most, as cuda::arch_traits of CUDA's own headers (CCCL 3.2) has them
    int smem_per_block, smem_per_sm;
};

constexpr Gpu kGpus[] = {
    {8, 0, 163, 164},
    {8, 6, 99, 100},
    {8, 7, 163, 164},
    {8, 9, 99, 100},
    {9, 0, 227, 228},
    {10, 0, 227, 228},
    {10, 3, 227, 228},
    {11, 0, 227, 228},
    {12, 0, 99, 100},
    {12, 1, 99, 100},
    // Of these two no code is made, but they run others'.
    {8, 8, 99, 100},
    {10, 7, 227, 228},
};
constexpr int kNumGpus = sizeof(kGpus) / sizeof(kGpus[0]);

// Machine code runs on its own compute capability and on later ones of the same major version.
constexpr bool runs_on(const Gpu &gpu) {
    for (int i = 0; i < kNumGpus; ++i) {
        if ((FORK_ARCHITECTURES >> i & 1) && kGpus[i].major == gpu.major && kGpus[i].minor <= gpu.minor) {
            return true;
        }
    }
    return false;
}

// Whether a condition holds on some of them, and fails on some.
struct Choice {
    bool yes, no;
};

template<typename Condition>
constexpr Choice choice(Condition holds) {
    Choice found{false, false};
    for (int i = 0; i < kNumGpus; ++i) {
        const Gpu &gpu = kGpus[i];
        if (!runs_on(gpu)) { continue; }
        if (holds(gpu.smem_per_block * 1024, gpu.smem_per_sm * 1024, gpu.major == 8 && gpu.minor > 0)) {
            found.yes = true;
        } else {
            found.no = true;
        }
    }
    return found;
}

}  // namespace fork_gpus
}  // namespace FLASH_NAMESPACE

// BOOL_SWITCH for what is known of the GPU, in upstream's names for it: only what can be so is compiled.
#define GPU_SWITCH(COND, CONST_NAME, ...) \
    [&] { \
        constexpr auto choice = ::FLASH_NAMESPACE::fork_gpus::choice( \
            [](int max_smem_per_block, int max_smem_per_sm, bool is_sm8x) { return COND; }); \
        const bool holds = COND; \
        if constexpr (choice.yes) { \
            constexpr static bool CONST_NAME = true; \
            if (holds) { return __VA_ARGS__(); } \
        } \
        if constexpr (choice.no) { \
            constexpr static bool CONST_NAME = false; \
            if (!holds) { return __VA_ARGS__(); } \
        } \
        C10_CUDA_CHECK(cudaErrorNoKernelImageForDevice); /* a GPU that this build is not for */ \
    }()

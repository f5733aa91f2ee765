// Which kernels this extension holds, and what a call for another one says.
//
// A kernel is (pass, head dim, dtype, causal or not), the unit of upstream's .cu files. A build that
// leaves some out defines FORK_KERNELS_FWD, FORK_KERNELS_SPLIT and FORK_KERNELS_BWD as bit masks; bit
// (head dim index * 2 + is_bf16) * 2 + is_causal stands for one file. Undefined means all of them.

#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <cutlass/numeric_types.h>

#include "namespace_config.h"
#include "core/error.h"

#ifndef FORK_KERNELS_FWD
#define FORK_KERNELS_FWD 0xffffff
#endif
#ifndef FORK_KERNELS_SPLIT
#define FORK_KERNELS_SPLIT 0xffffff
#endif
#ifndef FORK_KERNELS_BWD
#define FORK_KERNELS_BWD 0xffffff
#endif

namespace FLASH_NAMESPACE {
namespace fork_kernels {

enum class Pass { fwd, split, bwd };

constexpr std::array<int, 6> kHeadDims = {32, 64, 96, 128, 192, 256};
constexpr std::array<Pass, 3> kPasses = {Pass::fwd, Pass::split, Pass::bwd};

// Of the kernels that serve a head dim: HEADDIM_SWITCH's.
constexpr int head_dim_of(int head_dim) {
    return head_dim <= 128 ? (head_dim + 31) / 32 * 32 : head_dim <= 192 ? 192 : 256;
}

constexpr uint32_t mask(Pass pass) {
    return pass == Pass::fwd ? FORK_KERNELS_FWD
                             : (pass == Pass::split ? FORK_KERNELS_SPLIT : FORK_KERNELS_BWD);
}

constexpr bool has(Pass pass, int head_dim, bool is_bf16, bool is_causal) {
    for (int i = 0; i < int(kHeadDims.size()); ++i) {
        if (kHeadDims[i] == head_dim) { return (mask(pass) >> ((i * 2 + is_bf16) * 2 + is_causal)) & 1u; }
    }
    return false;
}

template<typename T, int kHeadDim, bool Is_causal>
constexpr bool built(Pass pass) {
    return has(pass, kHeadDim, std::is_same_v<T, cutlass::bfloat16_t>, Is_causal);
}

inline const char *pass_name(Pass pass) {
    return pass == Pass::fwd ? "forward" : (pass == Pass::split ? "split forward" : "backward");
}

inline std::string kernel_name(Pass pass, int head_dim, bool is_bf16, bool is_causal) {
    const char *short_name = pass == Pass::fwd ? "fwd" : (pass == Pass::split ? "split" : "bwd");
    return std::string(short_name) + "_hdim" + std::to_string(head_dim) + (is_bf16 ? "_bf16" : "_fp16")
        + (is_causal ? "_causal" : "");
}

// Names of all kernels here, such as "split_hdim64_fp16_causal", in the order of the masks.
inline std::vector<std::string> list() {
    std::vector<std::string> names;
    for (Pass pass : kPasses) {
        for (int head_dim : kHeadDims) {
            for (bool is_bf16 : {false, true}) {
                for (bool is_causal : {false, true}) {
                    if (has(pass, head_dim, is_bf16, is_causal)) {
                        names.push_back(kernel_name(pass, head_dim, is_bf16, is_causal));
                    }
                }
            }
        }
    }
    return names;
}

// The same for a person: "forward: head_dim 64 (float16, bfloat16), 128 (float16); …".
inline std::string summary() {
    std::string text;
    for (Pass pass : kPasses) {
        std::string dims;
        for (int head_dim : kHeadDims) {
            std::string variants;
            for (bool is_bf16 : {false, true}) {
                const bool full = has(pass, head_dim, is_bf16, false),
                           causal = has(pass, head_dim, is_bf16, true);
                if (!full && !causal) { continue; }
                variants += (variants.empty() ? "" : ", ") + std::string(is_bf16 ? "bfloat16" : "float16")
                    + (full && causal ? "" : (causal ? " causal only" : " not causal only"));
            }
            if (!variants.empty()) {
                dims += (dims.empty() ? "" : ", ") + std::to_string(head_dim) + " (" + variants + ")";
            }
        }
        text += (text.empty() ? "" : "; ") + std::string(pass_name(pass)) + ": "
            + (dims.empty() ? "none" : "head_dim " + dims);
    }
    return text;
}

inline void missing(Pass pass, int head_dim, bool is_bf16, bool is_causal) {
    FORK_CHECK_NOT_IMPLEMENTED(false, "this wheel has no kernels for head_dim ", head_dim, " ",
        is_bf16 ? "bfloat16" : "float16", " ", is_causal ? "causal " : "", pass_name(pass), "; it has ",
        summary(),
        ". Head dims are rounded up to the next kernel. Install a wheel with more kernels or build one "
        "(nox -s build -- --kernels all).");
}

}  // namespace fork_kernels
}  // namespace FLASH_NAMESPACE

// Calls KERNEL<T, kHeadDim, Is_causal>(params, stream) where it was built, else raises the error above. The
// discarded branch odr-uses nothing, so a kernel that was left out needs no stub to link.
#define FORK_LAUNCH(PASS, KERNEL, T, HEADDIM, CAUSAL) \
    if constexpr (FLASH_NAMESPACE::fork_kernels::built<T, HEADDIM, CAUSAL>( \
                      FLASH_NAMESPACE::fork_kernels::Pass::PASS)) { \
        KERNEL<T, HEADDIM, CAUSAL>(params, stream); \
    } else { \
        FLASH_NAMESPACE::fork_kernels::missing(FLASH_NAMESPACE::fork_kernels::Pass::PASS, HEADDIM, \
            std::is_same_v<T, cutlass::bfloat16_t>, CAUSAL); \
    }

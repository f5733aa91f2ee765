#include "launch.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <utility>

#include <cuda.h>
#include <cutlass/numeric_types.h>

#include "call.h"
#include "fork_kernel_set.h"
#include "fork_mode.h"
#include "fork_runtime.h"
#include "fork_simple_call.h"
#include "fork_split.h"
#include "params.h"
#include "static_switch.h"

namespace FLASH_NAMESPACE {
namespace core {
namespace {
thread_local int entered = -1;  // the GPU that OnGpu made this thread's, so that nobody asks CUDA again
}
}  // namespace core
}  // namespace FLASH_NAMESPACE

// Where the linker sends the library's calls of some of CUDA's functions to __wrap_..., they are shorter. All
// works without, as where a toolkit has other names for its private ones (FORK_NO_WRAP=1 of a build).
#if defined(FORK_WRAPPED) && !defined(FORK_EMULATED)
#define FORK_WRAPS 1
#define FORK_OF_CUDA(NAME) __real_##NAME
#else
#define FORK_WRAPS 0
#define FORK_OF_CUDA(NAME) NAME
#endif

#if FORK_WRAPS
extern "C" cudaError_t __real_cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device);
#endif

namespace FLASH_NAMESPACE {
namespace {

// A GPU's attributes do not change, so the first answer holds for the process, but where tests change the
// GPU. (MPS may let contexts of a process have multiprocessors of their own; their number is the first
// context's, too.)
cudaError_t kept_attribute(int *value, cudaDeviceAttr attr, int device) {
#ifdef FORK_EMULATED
    return FORK_OF_CUDA(cudaDeviceGetAttribute)(value, attr, device);
#else
    constexpr int kGpus = 64, kAttributes = 128;
    static std::atomic<unsigned> answers[kGpus][kAttributes];  // one more than each; 0: not asked yet
    if (device < 0 || device >= kGpus || attr >= kAttributes) {
        return FORK_OF_CUDA(cudaDeviceGetAttribute)(value, attr, device);
    }
    std::atomic<unsigned> &kept = answers[device][attr];
    unsigned answer = kept.load(std::memory_order_relaxed);
    if (answer == 0) {
        const cudaError_t status = FORK_OF_CUDA(cudaDeviceGetAttribute)(value, attr, device);
        if (status != cudaSuccess) { return status; }
        const unsigned mine = static_cast<unsigned>(*value) + 1;
        if (kept.compare_exchange_strong(answer, mine, std::memory_order_relaxed)) { answer = mine; }
    }
    *value = static_cast<int>(answer - 1);
    return cudaSuccess;
#endif
}

}  // namespace

int device_attribute(cudaDeviceAttr attribute) {
    int device = core::entered, value;
    if (device < 0) { FORK_CHECK_CUDA(cudaGetDevice(&device)); }
    FORK_CHECK_CUDA(kept_attribute(&value, attribute, device));
    return value;
}

}  // namespace FLASH_NAMESPACE

#if FORK_WRAPS
// Each launch allows its kernel to have dynamic shared memory, and asks for nothing else; CUDA takes a
// microsecond for it each time.
extern "C" {
cudaError_t __real_cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value);

cudaError_t __wrap_cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    int device;
    const cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess || attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
        return status != cudaSuccess ? status : __real_cudaFuncSetAttribute(kernel, attribute, value);
    }
    // Allowed so far; it only grows, for calls of other threads need it. The thread's last kernels first.
    struct Allowed {
        const void *kernel;
        int device, value;
    };
    constexpr int kLast = 4;
    static thread_local Allowed last[kLast] = {};
    static thread_local unsigned next = 0;
    for (const Allowed &one : last) {
        if (one.kernel == kernel && one.device == device && one.value >= value) { return cudaSuccess; }
    }
    static std::mutex lock;
    static std::map<std::pair<const void *, int>, int> allowed;
    const std::lock_guard<std::mutex> held(lock);
    int &known = allowed[{kernel, device}];
    if (known < value) {
        const cudaError_t set = __real_cudaFuncSetAttribute(kernel, attribute, value);
        if (set != cudaSuccess) { return set; }
        known = value;
    }
    last[next++ % kLast] = {kernel, device, known};
    return cudaSuccess;
}

// Where OnGpu made a GPU the current one, that one is current.
cudaError_t __real_cudaGetDevice(int *device);

cudaError_t __wrap_cudaGetDevice(int *device) {
    if (FLASH_NAMESPACE::core::entered < 0) { return __real_cudaGetDevice(device); }
    *device = FLASH_NAMESPACE::core::entered;
    return cudaSuccess;
}

cudaError_t __wrap_cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device) {
    return FLASH_NAMESPACE::kept_attribute(value, attr, device);
}

#if CUDART_VERSION >= 13000
// Launches come here too: of <<<>>> CUDA 13's compiler makes a call of __cudaLaunchKernel. The driver's own
// function takes less time than the runtime's. Where it refuses, the runtime launches: it makes a context
// current in a thread that has none, and keeps the error for cudaGetLastError.
cudaError_t __real___cudaGetKernel(void **kernel, const void *host);
cudaError_t __real___cudaLaunchKernel(void *, dim3, dim3, void **, size_t, cudaStream_t);

// Where the library has no code for the GPU, a kernel's handle is its host function's address, which the
// runtime alone knows.
static std::atomic<bool> all_found{true};

cudaError_t __wrap___cudaGetKernel(void **kernel, const void *host) {
    const cudaError_t status = __real___cudaGetKernel(kernel, host);
    if (status != cudaSuccess) { all_found.store(false, std::memory_order_relaxed); }
    return status;
}

cudaError_t __wrap___cudaLaunchKernel(
    void *kernel, dim3 grid, dim3 block, void **params, size_t shared, cudaStream_t stream) {
    static const auto launch = [] {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result;
        const cudaError_t status =
            cudaGetDriverEntryPointByVersion("cuLaunchKernel", &found, 12000, cudaEnableDefault, &result);
        return reinterpret_cast<decltype(&cuLaunchKernel)>(status == cudaSuccess ? found : nullptr);
    }();
    if (launch != nullptr && all_found.load(std::memory_order_relaxed)
        && launch(reinterpret_cast<CUfunction>(kernel), grid.x, grid.y, grid.z, block.x, block.y, block.z,
               static_cast<unsigned>(shared), stream, params, nullptr)
            == CUDA_SUCCESS) {
        return cudaSuccess;
    }
    return __real___cudaLaunchKernel(kernel, grid, block, params, shared, stream);
}
#endif
}
#endif

namespace FLASH_NAMESPACE {

namespace core {
namespace {
thread_local cudaError_t raised = cudaSuccess;
}
cudaError_t take_raised() { return std::exchange(raised, cudaSuccess); }
}  // namespace core

void check_cuda(cudaError_t status, const char *file, const char *function, int line) {
    if (status == cudaSuccess) { return; }
    cudaGetLastError();  // which is not the next call's
    core::raised = status;
    FORK_CHECK_AS(runtime, false, "CUDA error: ", cudaGetErrorString(status), " (", cudaGetErrorName(status),
        ", in ", function, ", ", file, ":", line, ")");
}

namespace core {

namespace {

constexpr int kMostSplits = 128;  // of upstream's kernel that combines them

int current_gpu() {
    int device;
    FORK_CHECK_CUDA(cudaGetDevice(&device));
    return device;
}

// Upstream's heuristic: the fewest splits whose last wave of thread blocks leaves the GPU nearly as busy as
// the best number would.
int splits_that_fill(int num_blocks, int num_slots, int num_n_blocks) {
    if (num_blocks >= 0.8f * num_slots) { return 1; }
    const int max_splits = std::min({kMostSplits, num_slots, num_n_blocks});
    const auto blocks_per_split = [&](int splits) { return (num_n_blocks + splits - 1) / splits; };
    // With as many blocks to a split as one split fewer has, it is that number of splits in truth.
    const auto counts = [&](int splits) {
        return splits == 1 || blocks_per_split(splits) != blocks_per_split(splits - 1);
    };
    float efficiency[kMostSplits + 1] = {}, best = 0.f;
    for (int splits = 1; splits <= max_splits; ++splits) {
        if (!counts(splits)) { continue; }
        const float waves = float(num_blocks * splits) / num_slots;
        efficiency[splits] = waves / std::ceil(waves);
        best = std::max(best, efficiency[splits]);
    }
    for (int splits = 1; splits <= max_splits; ++splits) {
        if (counts(splits) && efficiency[splits] >= 0.85 * best) { return splits; }
    }
    return 1;
}

// A decoding loop asks the same again and again, and the answer takes a microsecond.
int remembered_splits(int num_blocks, int num_slots, int num_n_blocks) {
    static thread_local int asked[3] = {}, answer = 0;
    const int asks[3] = {num_blocks, num_slots, num_n_blocks};
    if (answer == 0 || !std::equal(asks, asks + 3, asked)) {
        answer = splits_that_fill(num_blocks, num_slots, num_n_blocks);
        std::copy(asks, asks + 3, asked);
    }
    return answer;
}

}  // namespace

OnGpu::OnGpu(int index) : before_(current_gpu()), changed_(before_ != index) {
    if (changed_) { FORK_CHECK_CUDA(cudaSetDevice(index)); }
    outer_ = std::exchange(entered, index);
}
OnGpu::~OnGpu() {
    entered = outer_;
    if (changed_) { cudaSetDevice(before_); }
}

int enter_framework() { return std::exchange(entered, -1); }
void leave_framework(int before) { entered = before; }

const GpuFacts &gpu_facts() {
    static thread_local GpuFacts facts;  // until the thread asks again
    return facts = {device_attribute(cudaDevAttrComputeCapabilityMajor),
               device_attribute(cudaDevAttrComputeCapabilityMinor),
               device_attribute(cudaDevAttrMultiProcessorCount)};
}

void *unread_memory(size_t bytes, const Host &host) {
#ifndef FORK_EMULATED
    // All small calls of a GPU share it: an allocation of the framework's takes a fifth of a short call.
    constexpr size_t kMost = 1 << 20;
    constexpr int kGpus = 64;
    static void *shared[kGpus];
    const int gpu = current_gpu();
    if (bytes <= kMost && gpu < kGpus) {
        static std::mutex lock;
        const std::lock_guard<std::mutex> held(lock);
        if (shared[gpu] != nullptr) { return shared[gpu]; }
        // Not the framework's: a pool of its, such as a CUDA graph's, may take its memory back. Relaxed, so
        // that no capture is broken by it.
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        FORK_CHECK_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
        const cudaError_t status = cudaMalloc(&shared[gpu], kMost);
        cudaThreadExchangeStreamCaptureMode(&mode);
        if (status == cudaSuccess) { return shared[gpu]; }
        shared[gpu] = nullptr;
        cudaGetLastError();  // which is not the next call's
    }
#endif
    Scratch scratch;
    const size_t begin = scratch.reserve(bytes);
    scratch.allocate(host);
    return scratch.at(begin);
}

void check_gpu() { FORK_CHECK(gpu_facts().major >= 8, "FlashAttention only supports Ampere GPUs or newer."); }

void set_splits(
    Flash_fwd_params &params, Scratch &scratch, const Host &host, float p_dropout, int num_splits) {
    const int tile = fork_keys::tile(params.d), num_slots = 2 * gpu_facts().multiprocessors;
    const int num_n_blocks = (params.seqlen_k + tile - 1) / tile;
    const int num_m_blocks = (params.seqlen_q + 64 - 1) / 64;
    params.num_splits = num_splits;
    if (p_dropout == 0.f) {  // with dropout keys are not split
        if (params.fork.n_blocks_per_split > 0) {
            params.fork.num_chunks = std::max(
                1, (num_n_blocks + params.fork.n_blocks_per_split - 1) / params.fork.n_blocks_per_split);
            const int64_t num_blocks = int64_t(params.b) * params.h * num_m_blocks;
            const bool one_block =
                fork_split::one_block_walks(params.d, params.fork.num_chunks, num_blocks, num_slots);
            if (fork_split::shares_tiles(params, one_block)) {
                params.fork.group = params.h_h_k_ratio;
                params.h_h_k_ratio = 1;
            }
            params.num_splits = one_block && params.fork.group == 1 ? 1 : params.fork.num_chunks;
        } else if (num_splits < 1) {
            const int64_t num_blocks = int64_t(params.b) * params.h * num_m_blocks;
            params.num_splits =
                remembered_splits(int(std::min<int64_t>(num_blocks, num_slots)), num_slots, num_n_blocks);
        }
        FORK_CHECK(params.num_splits <= kMostSplits || params.fork.n_blocks_per_split > 0,
            "num_splits > 128 not supported");
        if (params.num_splits > 1) {
            const int64_t states = params.fork.n_blocks_per_split > 0 ? 2 : 1;  // max and sum; or lse
            const int heads = params.h / params.fork.group,
                      rows_of_head = params.seqlen_q * params.fork.group;
            const int block_rows = fork_split::rows_in_turns(params, heads, rows_of_head, num_slots);
            const bool in_turns = block_rows > 0;
            const int64_t row_blocks =
                in_turns ? fork_in_turns::row_blocks(int64_t(params.b) * heads, rows_of_head, block_rows) : 0;
            fork_slices::Slice &slice = params.fork.slice;
            slice = in_turns ? fork_slices::Slice{params.b, heads, rows_of_head, 1}
                             : fork_split::slice(params, params.b, heads, rows_of_head, params.d_rounded);
            const int64_t rows = slice.splits * fork_slices::num_rows(slice);
            const int64_t carried =
                in_turns || slice.splits == params.num_splits ? 0 : fork_slices::num_rows(slice);
            const int64_t running = row_blocks * block_rows;  // rows
            const int64_t turns_bytes = in_turns ? (row_blocks + 2) * sizeof(int) : 0;
            const size_t lse = scratch.reserve(rows * states * sizeof(float));
            const size_t out = scratch.reserve(rows * params.d_rounded * sizeof(float));
            const size_t turns = scratch.reserve(turns_bytes);
            const size_t running_states = scratch.reserve(running * sizeof(float2));
            const size_t running_acc = scratch.reserve(running * params.d_rounded * sizeof(float));
            const size_t carried_states = scratch.reserve(carried * sizeof(float2));
            const size_t carried_acc = scratch.reserve(carried * params.d_rounded * sizeof(float));
            scratch.allocate(host);
            if (in_turns && host.measured == nullptr) {
                int *const turn = scratch.at<int>(turns);
                params.fork.turns = {turn + row_blocks, turn, scratch.at<float2>(running_states),
                    scratch.at<float4>(running_acc)};
                params.fork.wait_limit = uint16_t(fork_mode::wait_limit());
                params.fork.tall_turns = block_rows == fork_in_turns::kTallRows;
                const int chunks = fork_in_turns::walked(block_rows);  // of a thread block
                params.num_splits = slice.splits = (params.num_splits + chunks - 1) / chunks;
                FORK_CHECK_CUDA(cudaMemsetAsync(turn, 0, turns_bytes, host.stream));
            }
            params.fork.carried = {scratch.at<float2>(carried_states), scratch.at<float>(carried_acc)};
            params.softmax_lseaccum_ptr = scratch.at(lse);
            params.oaccum_ptr = scratch.at(out);
        }
    }
    fork_mode::log_splitkv(params.b, params.seqlen_k, params.seqlen_q * params.fork.group, num_n_blocks,
        params.fork.n_blocks_per_split > 0 ? params.fork.num_chunks : params.num_splits,
        params.fork.n_blocks_per_split * tile);
}

void run_forward(Flash_fwd_params &params, cudaStream_t stream, bool only_split_kernel) {
    params.num_splits > 1 ? check_grid(params.fork.slice.b, params.fork.slice.h)
                          : check_grid(params.b, params.h);
    const int num_slots = 2 * gpu_facts().multiprocessors;
    const bool standard = params.num_splits <= 1 && !only_split_kernel
        && fork_bias::standard(params, num_slots)
        && (params.fork.n_blocks_per_split == 0 || fork_split::standard(params, num_slots));
    FP16_SWITCH(!params.is_bf16, [&] {
        HEADDIM_SWITCH(params.d, [&] {
            BOOL_SWITCH(params.is_causal, Is_causal, [&] {
                if (standard) {
                    FORK_LAUNCH(fwd, run_mha_fwd_, elem_type, kHeadDim, Is_causal);
                } else {
                    FORK_LAUNCH(split, run_mha_fwd_splitkv_dispatch, elem_type, kHeadDim, Is_causal);
                }
            });
        });
    });
}

void run_backward(Flash_bwd_params &params, cudaStream_t stream) {
    FP16_SWITCH(!params.is_bf16, [&] {
        HEADDIM_SWITCH(params.d, [&] {
            BOOL_SWITCH(params.is_causal, Is_causal,
                [&] { FORK_LAUNCH(bwd, run_mha_bwd_, elem_type, kHeadDim, Is_causal); });
        });
    });
}

}  // namespace core
}  // namespace FLASH_NAMESPACE

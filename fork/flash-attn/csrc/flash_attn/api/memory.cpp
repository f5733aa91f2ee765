#include "api/memory.h"

#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "api/answer.h"
#include "api/calls.h"
#include "api/small_kernels.h"

namespace FLASH_NAMESPACE {
namespace api {

namespace {

constexpr size_t kAlignment = 256;

// Calls run side by side, and cleanup alone. (No std::shared_mutex or std::condition_variable: their symbols
// are newer than the oldest system that a wheel may meet.)
class Turns {
public:
    void enter() {
        calls_.fetch_add(1);
        if (!closing_.load()) { return; }
        calls_.fetch_sub(1);
        const std::lock_guard<std::mutex> after(alone_);  // when cleanup is done, and while none is
        calls_.fetch_add(1);
    }
    void leave() { calls_.fetch_sub(1); }

    template<typename Function>
    void alone(Function &&function) {
        const std::lock_guard<std::mutex> held(alone_);
        const Closing closing(closing_);
        while (calls_.load() != 0) { std::this_thread::yield(); }
        function();
    }

private:
    class Closing {
    public:
        explicit Closing(std::atomic<bool> &flag) : flag_(flag) { flag_.store(true); }
        ~Closing() { flag_.store(false); }

    private:
        std::atomic<bool> &flag_;
    };

    std::mutex alone_;
    std::atomic<int> calls_{0};
    std::atomic<bool> closing_{false};
};
Turns turns;

// It is never destroyed: after many that were destroyed beside launched work, a later call ended in the
// driver (580.159).
struct Pool {
    cudaMemPool_t at = nullptr;
    bool keeps = false;  // what calls gave back, for the next call
};
std::mutex pools_lock;
std::map<int, Pool> pools;  // by device

constexpr int kMostDevices = 64;
std::atomic<bool> known_ready[kMostDevices];

// What is done once on a device may happen within a capture, which it must not break.
class Uncaptured {
public:
    Uncaptured() : mode_(cudaStreamCaptureModeRelaxed) { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~Uncaptured() { cudaThreadExchangeStreamCaptureMode(&mode_); }

private:
    cudaStreamCaptureMode mode_;
};

void accept_cuda(cudaError_t status, const char *what) {
    if (status == cudaSuccess) { return; }
    cudaGetLastError();  // which is not the caller's next call's
    const cudaError_t told_as = told(status);
    throw Refusal(told_as, core::text_of(what, ": ", cudaGetErrorString(told_as)));
}

int current_device() {
    int device = 0;
    accept_cuda(cudaGetDevice(&device), "there is no GPU to run on");
    return device;
}

void get_ready(int device) {
    const Uncaptured uncaptured;
    const core::GpuFacts &gpu = core::gpu_facts();
    FORK_ACCEPT_AS(cudaErrorNoKernelImageForDevice, gpu.major >= 8, "device ", device,
        " has compute capability ", gpu.major, ".", gpu.minor, "; 8.0 (Ampere) or newer is needed");
    const cudaError_t status = find_code();
    if (status != cudaSuccess) {
        cudaGetLastError();
        throw Refusal(told(status),
            core::text_of("device ", device, " has compute capability ", gpu.major, ".", gpu.minor,
                ", which this build has no code for, or its code could not be loaded: ",
                cudaGetErrorString(status)));
    }
}

// How many bytes stay in a pool when work is waited for.
cudaError_t threshold(const Pool &pool, uint64_t bytes) {
    return cudaMemPoolSetAttribute(pool.at, cudaMemPoolAttrReleaseThreshold, &bytes);
}

// Memory that calls gave back stays in the pool, or each call would wait for the system to map some.
cudaMemPool_t pool_of(int device) {
    const std::lock_guard<std::mutex> held(pools_lock);
    Pool &pool = pools[device];
    if (pool.keeps) { return pool.at; }
    const Uncaptured uncaptured;
    if (pool.at == nullptr) {
        cudaMemPoolProps wanted{};
        wanted.allocType = cudaMemAllocationTypePinned;
        wanted.location.type = cudaMemLocationTypeDevice;
        wanted.location.id = device;
        accept_cuda(cudaMemPoolCreate(&pool.at, &wanted),
            "this device has no memory in a stream's order, so a call needs a workspace");
    }
    accept_cuda(threshold(pool, UINT64_MAX), "a memory pool could not be set up");
    pool.keeps = true;
    return pool.at;
}

}  // namespace

Ready::Ready() : device_(current_device()) {
    turns.enter();
    try {
        cudaGetLastError();  // what an earlier call left is not ours
        if (device_ >= kMostDevices || !known_ready[device_].load(std::memory_order_acquire)) {
            get_ready(device_);
            if (device_ < kMostDevices) { known_ready[device_].store(true, std::memory_order_release); }
        }
    } catch (...) {
        turns.leave();
        throw;
    }
}

Ready::~Ready() { turns.leave(); }

void release_memory() {
    cudaError_t failed = cudaSuccess;
    turns.alone([&] {
        for (std::atomic<bool> &ready : known_ready) { ready.store(false); }
        for (auto &entry : pools) {
            Pool &pool = entry.second;
            if (!pool.keeps) { continue; }
            const Uncaptured uncaptured;
            cudaError_t status = threshold(pool, 0);
            if (status == cudaSuccess) { status = cudaMemPoolTrimTo(pool.at, 0); }
            pool.keeps = status != cudaSuccess;
            if (status != cudaSuccess) { failed = status; }
        }
    });
    accept_cuda(failed, "memory could not be given back");
}

Memory Memory::of_workspace(int device, void *at, size_t size, cudaStream_t stream) {
    return {device, at, size, stream, Use::run};
}

void Memory::check_workspace() const {
    FORK_ACCEPT(reinterpret_cast<uintptr_t>(at_) % kAlignment == 0, "workspace must begin at a multiple of ",
        kAlignment, " bytes");
    if (runs() && at_ != nullptr && size_ > 0) { check_place("workspace", at_, device_); }
}

Memory::~Memory() {
    for (void *block : held_) { cudaFreeAsync(block, stream_); }
}

void *Memory::take(size_t bytes) {
    if (bytes == 0) { return nullptr; }
    const size_t begin = bytes_;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (at_ != nullptr) {
        FORK_ACCEPT(bytes_ <= size_, "workspace_size=", size_, " is too small: ", bytes_,
            " bytes or more are needed (flash_attention_v2_forward_workspace and "
            "flash_attention_v2_backward_workspace tell)");
        return at_ + begin;
    }
    if (!runs()) { return reinterpret_cast<void *>(kAlignment); }  // nobody reads or writes there
    void *block = nullptr;
    held_.reserve(held_.size() + 1);
    const cudaError_t status = cudaMallocFromPoolAsync(&block, bytes, pool_of(device_), stream_);
    accept_cuda(status, "no memory for the workspace");
    held_.push_back(block);
    return block;
}

core::Host Memory::host() {
    const auto allocate = [](void *context, size_t bytes) {
        return static_cast<Memory *>(context)->take(bytes);
    };
    const auto warn = [](void *, const char *) {};  // docs/cpp.md says what the mode does not cover
    return {stream_, this, allocate, warn, measures() ? &bytes_ : nullptr};
}

}  // namespace api
}  // namespace FLASH_NAMESPACE

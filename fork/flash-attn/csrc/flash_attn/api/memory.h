// Memory of a call: the caller's workspace, or the stream's, from a pool of the device.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include "namespace_config.h"
#include "core/host.h"

namespace FLASH_NAMESPACE {
namespace api {

// A device that calls may run on. While one lives, cleanup waits.
class Ready {
public:
    // Of the current device. Raises Refusal where there is none, or none that this build has code for.
    Ready();
    ~Ready();
    Ready(const Ready &) = delete;
    Ready &operator=(const Ready &) = delete;
    int device() const { return device_; }

private:
    int device_;
};

// Gives back what pools keep; what launched work still uses goes when it is waited for.
void release_memory();

class Memory {
public:
    // Nothing is taken or launched: bytes are counted, or the call's arguments are looked at and no more, for
    // which no GPU is needed.
    static Memory measuring(int device) { return {device, nullptr, 0, nullptr, Use::measure}; }
    static Memory checking(void *at, size_t size) { return {0, at, size, nullptr, Use::check}; }
    static Memory of_workspace(int device, void *at, size_t size, cudaStream_t stream);
    static Memory of_stream(int device, cudaStream_t stream) {
        return {device, nullptr, 0, stream, Use::run};
    }
    ~Memory();
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    // Memory that lasts until the work of the stream so far is done; aligned to 256 bytes.
    void *take(size_t bytes);
    template<typename T>
    T *take_some(int64_t count) {
        return static_cast<T *>(take(size_t(count) * sizeof(T)));  // elements_of bounds it
    }

    // What the core asks this call for.
    core::Host host();

    bool measures() const { return use_ == Use::measure; }
    bool runs() const { return use_ == Use::run; }
    int device() const { return device_; }
    cudaStream_t stream() const { return stream_; }
    size_t bytes() const { return bytes_; }

private:
    enum class Use { run, measure, check };
    Memory(int device, void *at, size_t size, cudaStream_t stream, Use use)
        : device_(device), at_(static_cast<char *>(at)), size_(size), stream_(stream), use_(use) {
        check_workspace();
    }
    void check_workspace() const;

    const int device_;
    char *const at_;  // the workspace
    const size_t size_;
    const cudaStream_t stream_;
    const Use use_;
    size_t bytes_ = 0;
    std::vector<void *> held_;
};

}  // namespace api
}  // namespace FLASH_NAMESPACE

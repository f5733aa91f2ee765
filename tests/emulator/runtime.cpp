// As much of the CUDA runtime as flash-attention's launches need. Objects that nvcc made register their PTX here, and a launch
// runs it before it returns.
#include <cuda_runtime_api.h>

#include <cstdlib>

#include "machine.h"

namespace emulator {
namespace {

struct Binary {
    const char *fatbin;
    std::unique_ptr<Module> module;
};
struct Kernel {
    Binary *binary;
    std::string name;
    int dynamic_limit = 48 * 1024;
};
struct State {
    std::vector<std::unique_ptr<Binary>> binaries;
    std::map<const void *, Kernel> kernels;
    struct {
        dim3 grid, block;
        size_t shared;
        cudaStream_t stream;
    } call{};
    cudaError_t error = cudaSuccess;
    std::string message;
};
State &state() {
    static State *all = new State;
    return *all;
}

// The GPU that it says it is: FORK_EMULATED_GPU, a compute capability such as 89, or an H100.
struct Gpu {
    int major = 9, minor = 0;
    int smem_per_block = 227 * 1024;  // what a kernel may ask for; a multiprocessor has 1 KiB more
};
const Gpu &gpu() {
    static const Gpu chosen = [] {
        Gpu found;
        if (const char *name = std::getenv("FORK_EMULATED_GPU")) {
            const int capability = std::atoi(name);
            found.major = capability / 10, found.minor = capability % 10;
            const bool small = found.major == 12 || (found.major == 8 && found.minor != 0 && found.minor != 7);
            found.smem_per_block = (small ? 99 : found.major == 8 ? 163 : 227) * 1024;
        }
        return found;
    }();
    return chosen;
}

// The PTX in a fat binary: containers of a header and entries; kind 1 is PTX. Compressed entries are not read.
std::string ptx_of(const char *fatbin) {
    uint64_t content;
    uint16_t header;
    std::memcpy(&header, fatbin + 6, 2);
    std::memcpy(&content, fatbin + 8, 8);
    const char *at = fatbin + header, *end = at + content;
    while (at < end) {
        uint16_t kind;
        uint32_t entry_header;
        uint64_t size;
        std::memcpy(&kind, at, 2);
        std::memcpy(&entry_header, at + 4, 4);
        std::memcpy(&size, at + 8, 8);
        const char *text = at + entry_header;
        if (kind == 1 && std::string_view(text, std::min<size_t>(size, 200)).find(".version") != std::string_view::npos) {
            return std::string(text, strnlen(text, size));
        }
        at = text + size;
    }
    throw Fault("a fat binary without plain PTX: compile with -gencode=arch=compute_80,code=compute_80 --compress-mode=none");
}

cudaError_t fail(cudaError_t error, const std::string &message) {
    state().error = error;
    state().message = message;
    return error;
}

// Filled with NaN, so that what nobody wrote shows.
void *allocated(size_t size) {
    void *const at = std::aligned_alloc(256, (size + 511) / 256 * 256);
    if (at == nullptr) { return nullptr; }
    std::memset(at, 0xff, size);
    Memory::instance().add(at, size);
    return at;
}
void release(void *at) {
    if (at == nullptr) { return; }
    Memory::instance().remove(at);
    std::free(at);
}

cudaError_t launch(Kernel &kernel, dim3 grid, dim3 block, void **args, size_t shared) {
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535) {
        return fail(cudaErrorInvalidConfiguration, "invalid configuration argument: grid " + std::to_string(grid.x) + ", " + std::to_string(grid.y) + ", " + std::to_string(grid.z));
    }
    try {
        if (!kernel.binary->module) { kernel.binary->module = std::make_unique<Module>(ptx_of(kernel.binary->fatbin)); }
        Launch launch{&kernel.binary->module->code(kernel.name), {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, 0, {}};
        if (shared > size_t(kernel.dynamic_limit)) { return fail(cudaErrorInvalidValue, "more shared memory than the kernel was allowed: " + std::to_string(shared)); }
        launch.shared_bytes = uint32_t((launch.code->shared_bytes + 15) / 16 * 16 + shared);
        for (size_t n = 0; n < launch.code->param_offsets.size(); ++n) {
            launch.params.resize(launch.code->param_offsets[n] + launch.code->param_sizes[n]);
            std::memcpy(launch.params.data() + launch.code->param_offsets[n], args[n], launch.code->param_sizes[n]);
        }
        run(*kernel.binary->module, launch);
        return cudaSuccess;
    } catch (const Fault &fault) {
        return fail(cudaErrorIllegalAddress, fault.what());
    }
}

}  // namespace
}  // namespace emulator

using emulator::state;

extern "C" {

void **__cudaRegisterFatBinary(void *wrapper) {
    struct Wrapper {
        int magic, version;
        const char *data;
        void *rest;
    };
    state().binaries.push_back(std::make_unique<emulator::Binary>(emulator::Binary{static_cast<Wrapper *>(wrapper)->data, nullptr}));
    return reinterpret_cast<void **>(state().binaries.back().get());
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
char __cudaInitModule(void **) { return 0; }
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
void __cudaRegisterFunction(void **handle, const char *host, char *, const char *name, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {
    state().kernels[host] = {reinterpret_cast<emulator::Binary *>(handle), name};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    state().call = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = state().call.grid, *block = state().call.block, *shared = state().call.shared;
    *static_cast<cudaStream_t *>(stream) = state().call.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    *kernel = reinterpret_cast<cudaKernel_t>(&state().kernels.at(host));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t) {
    return emulator::launch(*reinterpret_cast<emulator::Kernel *>(kernel), grid, block, args, shared);
}
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return __cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
cudaError_t CUDARTAPI cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t) {
    return emulator::launch(state().kernels.at(host), grid, block, args, shared);
}
cudaError_t CUDARTAPI cudaFuncSetAttribute(const void *host, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value > emulator::gpu().smem_per_block) { return emulator::fail(cudaErrorInvalidValue, "more shared memory than a block can have: " + std::to_string(value)); }
        int &limit = state().kernels.at(host).dynamic_limit;
        if (value < limit) { return emulator::fail(cudaErrorInvalidValue, "the limit of shared memory is lowered, which a launch of another thread may need"); }
        limit = value;
    }
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMalloc(void **at, size_t size) {
    *at = emulator::allocated(size);
    return *at ? cudaSuccess : emulator::fail(cudaErrorMemoryAllocation, "no memory for " + std::to_string(size) + " bytes");
}
cudaError_t CUDARTAPI cudaFree(void *at) {
    emulator::release(at);
    return cudaSuccess;
}
// One pool that keeps nothing: memory is given back where its stream would come to it.
cudaError_t CUDARTAPI cudaMemPoolCreate(cudaMemPool_t *pool, const cudaMemPoolProps *) {
    *pool = reinterpret_cast<cudaMemPool_t>(&state());
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaMallocFromPoolAsync(void **at, size_t size, cudaMemPool_t, cudaStream_t) { return cudaMalloc(at, size); }
cudaError_t CUDARTAPI cudaFreeAsync(void *at, cudaStream_t) { return cudaFree(at); }
cudaError_t CUDARTAPI cudaPointerGetAttributes(cudaPointerAttributes *found, const void *at) {
    *found = {};
    const bool ours = emulator::Memory::instance().holds(reinterpret_cast<uint64_t>(at), 1);
    found->type = ours ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    found->devicePointer = ours ? const_cast<void *>(at) : nullptr;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemset(void *at, int value, size_t size) {
    std::memset(at, value, size);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) {
    std::memcpy(to, from, size);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t) {
    std::memset(at, value, size);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t) {
    std::memcpy(to, from, size);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    // For tests of what calls leave out then; nothing is captured.
    *status = std::getenv("FORK_EMULATED_CAPTURE") ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : emulator::fail(cudaErrorInvalidDevice, "device " + std::to_string(device) + "; there is one");
}
cudaError_t CUDARTAPI cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: *value = int(emulator::options().processors); return cudaSuccess;
        case cudaDevAttrComputeCapabilityMajor: *value = emulator::gpu().major; return cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor: *value = emulator::gpu().minor; return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = emulator::gpu().smem_per_block + 1024; return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = emulator::gpu().smem_per_block; return cudaSuccess;
        case cudaDevAttrPageableMemoryAccess: *value = 0; return cudaSuccess;
        default: return emulator::fail(cudaErrorInvalidValue, "device attribute " + std::to_string(attribute));
    }
}
cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t shared, unsigned) {
    *blocks = shared + 1024 > size_t(emulator::gpu().smem_per_block + 1024) / 2 ? 1 : 2;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, threads, shared, 0);
}
cudaError_t CUDARTAPI cudaGetLastError() {
    const cudaError_t error = state().error;
    state().error = cudaSuccess;
    return error;
}
cudaError_t CUDARTAPI cudaPeekAtLastError() { return state().error; }
const char *CUDARTAPI cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : state().message.c_str(); }
const char *CUDARTAPI cudaGetErrorName(cudaError_t) { return "emulated"; }

// What does not exist here: a launch has ended when it returns.
namespace {
cudaError_t absent(const char *what) { return emulator::fail(cudaErrorNotSupported, std::string(what) + " cannot be emulated"); }
}  // namespace
cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t *, unsigned) { return absent("streams"); }
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t) { return absent("streams"); }
cudaError_t CUDARTAPI cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return absent("graphs"); }
cudaError_t CUDARTAPI cudaStreamEndCapture(cudaStream_t, cudaGraph_t *) { return absent("graphs"); }
cudaError_t CUDARTAPI cudaGraphInstantiate(cudaGraphExec_t *, cudaGraph_t, unsigned long long) { return absent("graphs"); }
cudaError_t CUDARTAPI cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return absent("graphs"); }
cudaError_t CUDARTAPI cudaGraphExecDestroy(cudaGraphExec_t) { return absent("graphs"); }
cudaError_t CUDARTAPI cudaGraphDestroy(cudaGraph_t) { return absent("graphs"); }
cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t *) { return absent("events"); }
cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t) { return absent("events"); }
cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t, cudaStream_t) { return absent("events"); }
cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t) { return absent("events"); }
cudaError_t CUDARTAPI cudaEventElapsedTime(float *, cudaEvent_t, cudaEvent_t) { return absent("events"); }
cudaError_t CUDARTAPI cudaMemGetInfo(size_t *, size_t *) { return absent("the size of memory"); }
cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp *, int) { return absent("a device's name"); }

}  // extern "C"

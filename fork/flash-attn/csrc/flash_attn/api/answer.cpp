#include "api/answer.h"

#include <new>

#include "host.h"

namespace FLASH_NAMESPACE {
namespace api {

namespace {

thread_local std::string last;

cudaError_t note(cudaError_t status, const char *words) noexcept {
    try {
        last = words;
    } catch (const std::bad_alloc &) { last.clear(); }
    return status;
}

cudaError_t status_of(const core::Error &error) {
    const cudaError_t raised = core::take_raised();
    if (raised != cudaSuccess) { return told(raised); }
    switch (error.kind) {
    case core::Kind::not_implemented:
        return cudaErrorNotSupported;
    case core::Kind::memory:
        return cudaErrorMemoryAllocation;
    default:
        return cudaErrorInvalidValue;
    }
}

}  // namespace

cudaError_t told(cudaError_t status) {
    switch (status) {
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorUnsupportedPtxVersion:
        return cudaErrorNoKernelImageForDevice;
    case cudaErrorInsufficientDriver: {
        int version = 0;  // 0: no driver at all
        return cudaDriverGetVersion(&version) == cudaSuccess && version == 0 ? cudaErrorNoDevice : status;
    }
    default:
        return status;
    }
}

cudaError_t caught() noexcept {
    try {
        throw;
    } catch (const Refusal &refusal) {
        return note(refusal.status, refusal.what());
    } catch (const core::Error &error) {
        return note(status_of(error), error.what());
    } catch (const std::bad_alloc &) {
        return note(cudaErrorMemoryAllocation, "no memory on the host");
    } catch (const std::exception &error) { return note(cudaErrorUnknown, error.what()); } catch (...) {
        return note(cudaErrorUnknown, "an error without words");
    }
}

const char *last_error() noexcept { return last.c_str(); }
void forget_error() noexcept {
    last.clear();
    core::take_raised();  // of another call, such as one of a binding's
}

}  // namespace api
}  // namespace FLASH_NAMESPACE

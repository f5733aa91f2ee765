// How the interface answers: a status, and words for this thread. Nothing is thrown to the caller.

#pragma once

#include <stdexcept>
#include <string>

#include <cuda_runtime_api.h>

#include "namespace_config.h"
#include "core/error.h"

namespace FLASH_NAMESPACE {
namespace api {

// A call that the interface refuses itself; what the core refuses is a core::Error.
struct Refusal : std::runtime_error {
    cudaError_t status;
    Refusal(cudaError_t of, const std::string &text) : std::runtime_error(text), status(of) {}
};

// The status by which callers know an error of CUDA's.
cudaError_t told(cudaError_t status);

// The exception that is being handled, as a status; its words are this thread's last error.
cudaError_t caught() noexcept;

const char *last_error() noexcept;
void forget_error() noexcept;

// Does what a function of the interface is for.
template<typename Function>
cudaError_t answered(Function &&function) noexcept {
    forget_error();
    try {
        function();
        return cudaSuccess;
    } catch (...) { return caught(); }
}

}  // namespace api
}  // namespace FLASH_NAMESPACE

#define FORK_ACCEPT_AS(STATUS, CONDITION, ...) \
    do { \
        if (!(CONDITION)) { \
            throw ::FLASH_NAMESPACE::api::Refusal(STATUS, ::FLASH_NAMESPACE::core::text_of(__VA_ARGS__)); \
        } \
    } while (0)
#define FORK_ACCEPT(CONDITION, ...) FORK_ACCEPT_AS(cudaErrorInvalidValue, CONDITION, __VA_ARGS__)

// Calls of the interface, as the core's.

#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "namespace_config.h"
#include "api/flash_attention_v2_c.h"
#include "api/memory.h"

namespace FLASH_NAMESPACE {
namespace api {

// The caller's struct, of a version that this library knows. Raises Refusal for null or another size.
template<typename Call>
const Call &known(const Call *call);

// Launches a call; or does with it what the memory is for.
void run(const flash_attention_v2_forward_call &call, Memory &memory);
void run(const flash_attention_v2_backward_call &call, Memory &memory);

// 1 / sqrt(head_dim), by way of double, as Python's binding takes it: else bits would differ.
float usual_scale(int64_t head_dim);

// Raises Refusal where a device cannot reach an address.
void check_place(const char *name, const void *data, int device);

// The numbers of an array of such sizes. Raises Refusal where no memory could hold them.
int64_t elements_of(const char *name, std::initializer_list<int64_t> sizes);

// As flash_attention_v2_forward_defaults.
template<typename Call>
Call defaults() {
    Call call{};
    call.size = sizeof(Call);
    call.options.window_left = call.options.window_right = -1;
    call.options.split_size = -1;
    return call;
}

// A contiguous array.
flash_attention_v2_tensor contiguous(
    const void *data, flash_attention_v2_dtype dtype, std::initializer_list<int64_t> sizes);

}  // namespace api
}  // namespace FLASH_NAMESPACE

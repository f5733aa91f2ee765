// A caller's array: where it lies, of what, and with which sizes and strides. The core owns none of them.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "namespace_config.h"
#include "core/error.h"

namespace FLASH_NAMESPACE {
namespace core {

enum class Dtype : uint8_t { fp16, bf16, fp32, int32, int64, boolean, other };

// In torch's words.
inline void append(std::string &text, Dtype dtype) {
    constexpr const char *kNames[] = {"Half", "BFloat16", "Float", "Int", "Long", "Bool", "another dtype"};
    text += kNames[int(dtype)];
}

inline int64_t bytes_of(Dtype dtype) {
    constexpr int kBytes[] = {2, 2, 4, 4, 8, 1, 0};
    return kBytes[int(dtype)];
}

// Where memory lies: a GPU by its number, or elsewhere, where kernels cannot read it.
struct Device {
    bool is_gpu = false;
    int index = 0;
    friend bool operator==(Device a, Device b) { return a.is_gpu == b.is_gpu && a.index == b.index; }
};
inline void append(std::string &text, Device device) {
    text += device.is_gpu ? "cuda:" + std::to_string(device.index) : "cpu";
}

struct Sizes {
    const int64_t *at;
    int count;
};
inline void append(std::string &text, Sizes sizes) {
    text += '[';
    for (int i = 0; i < sizes.count; ++i) { text += (i ? ", " : "") + std::to_string(sizes.at[i]); }
    text += ']';
}

constexpr int kMostDims = 5;

struct Tensor {
    void *data = nullptr;
    Dtype dtype = Dtype::other;
    Device device;
    int dims = -1;                                           // -1: not given
    int64_t sizes[kMostDims] = {}, strides[kMostDims] = {};  // strides in elements

    bool given() const { return dims >= 0; }
    // From the front, or with a negative place from the end.
    int64_t size(int place) const { return sizes[place < 0 ? dims + place : place]; }
    int64_t stride(int place) const { return strides[place < 0 ? dims + place : place]; }
    Sizes shape() const { return {sizes, dims}; }
    int64_t elements() const {
        int64_t product = 1;
        for (int i = 0; i < dims; ++i) { product *= sizes[i]; }
        return product;
    }
    // As a framework has it: sides of length 1 may have any stride.
    bool contiguous() const {
        int64_t expected = 1;
        for (int i = dims - 1; i >= 0; --i) {
            if (sizes[i] == 0) { return true; }
            if (sizes[i] != 1 && strides[i] != expected) { return false; }
            expected *= sizes[i];
        }
        return true;
    }
    // Whether rows, of the last dimension, have no gaps and begin at multiples of the 16 bytes that kernels
    // load at once.
    bool loadable() const {
        if (dims < 1 || strides[dims - 1] != 1) { return false; }
        int64_t steps = 0;
        for (int i = 0; i < dims - 1; ++i) { steps |= sizes[i] > 1 ? strides[i] : 0; }
        return elements() == 0 || (reinterpret_cast<uintptr_t>(data) | steps * bytes_of(dtype)) % 16 == 0;
    }
    template<typename T>
    T *as() const {
        return static_cast<T *>(data);
    }
};

// Checks of one argument, in the words that users see.

inline void check_rank(const char *name, const Tensor &tensor, int dims, const char *shape) {
    FORK_CHECK_VALUE(tensor.dims == dims, name, " must have ", dims, " dimensions ", shape, "; it has shape ",
        tensor.shape());
}

inline void check_device(const char *name, const Tensor &tensor, Device device) {
    FORK_CHECK(tensor.device.is_gpu, name, " must be on CUDA; it is on ", tensor.device);
    FORK_CHECK_VALUE(tensor.device == device, name, " is on ", tensor.device, ", q on ", device);
    // A tensor that stands for another while a program is traced lies nowhere.
    FORK_CHECK(tensor.data != nullptr || tensor.elements() == 0, name, " has no memory behind it");
}

inline void check_shape(
    const char *name, const Tensor &tensor, std::initializer_list<int64_t> shape, const char *words) {
    const Sizes wanted{shape.begin(), int(shape.size())};
    bool same = tensor.dims == wanted.count;
    for (int i = 0; same && i < wanted.count; ++i) { same = tensor.sizes[i] == wanted.at[i]; }
    FORK_CHECK(
        same, name, " must have shape (", words, "), which is ", wanted, " here; it has ", tensor.shape());
}

inline void check_rows(const char *name, const Tensor &tensor) {
    FORK_CHECK(tensor.stride(-1) == 1, name, " must have contiguous last dimension");
}

// A table of lengths, indices or pages.
inline void check_table(const char *name, const Tensor &tensor, Device device) {
    FORK_CHECK(tensor.dtype == Dtype::int32, name, " must have dtype int32; it has ", tensor.dtype);
    check_device(name, tensor, device);
    FORK_CHECK(tensor.contiguous(), name, " must be contiguous");
}

}  // namespace core
}  // namespace FLASH_NAMESPACE

// The sizes' names are the words of the error.
#define FORK_CHECK_SHAPE(NAME, TENSOR, ...) \
    ::FLASH_NAMESPACE::core::check_shape(NAME, TENSOR, {__VA_ARGS__}, #__VA_ARGS__)

#include "small_kernels.h"

#include <algorithm>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fork_runtime.h"

namespace FLASH_NAMESPACE {
namespace core {

namespace {

// Four dimensions, the first of which may be 1.
struct Walk {
    int64_t sizes[4], strides[4];
};

Walk walk_of(const Tensor &tensor) {
    Walk walk{{1, 1, 1, 1}, {0, 0, 0, 0}};
    for (int i = 0; i < tensor.dims; ++i) {
        walk.sizes[4 - tensor.dims + i] = tensor.sizes[i];
        walk.strides[4 - tensor.dims + i] = tensor.strides[i];
    }
    return walk;
}

constexpr int kThreads = 128;
constexpr int kMostBlocks = 65535;  // of the grid's y and z

// A thread block a row of the last dimension; grids shorter than the tensor go on where they end.
template<typename Element>
__global__ void fill_kernel(Element *data, const Walk walk, const float value) {
    for (int64_t i = blockIdx.z; i < walk.sizes[0]; i += gridDim.z) {
        for (int64_t j = blockIdx.y; j < walk.sizes[1]; j += gridDim.y) {
            for (int64_t k = blockIdx.x; k < walk.sizes[2]; k += gridDim.x) {
                for (int64_t l = threadIdx.x; l < walk.sizes[3]; l += kThreads) {
                    data[i * walk.strides[0] + j * walk.strides[1] + k * walk.strides[2]
                        + l * walk.strides[3]] = Element(value);
                }
            }
        }
    }
}

template<typename Element>
__global__ void sum_groups_kernel(Element *sum, const Element *heads, const Walk walk, const int groups) {
    const int64_t d = walk.sizes[3], h_k = walk.sizes[2];
    for (int64_t i = blockIdx.z; i < walk.sizes[0]; i += gridDim.z) {
        for (int64_t j = blockIdx.x; j < walk.sizes[1]; j += gridDim.x) {
            for (int64_t k = blockIdx.y; k < h_k; k += gridDim.y) {
                const Element *first = heads + (((i * walk.sizes[1] + j) * h_k + k) * groups) * d;
                for (int64_t l = threadIdx.x; l < d; l += kThreads) {
                    float total = float(first[l]);
                    for (int head = 1; head < groups; ++head) {
                        total = __fadd_rn(total, float(first[head * d + l]));
                    }
                    sum[i * walk.strides[0] + j * walk.strides[1] + k * walk.strides[2]
                        + l * walk.strides[3]] = Element(total);
                }
            }
        }
    }
}

template<typename Element>
__global__ void sum_parts_kernel(Element *sum, float *parts, const int64_t elements, const int num_parts) {
    const int64_t step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
        for (int left = num_parts; left > 1; left = (left + 1) / 2) {
            const int half = (left + 1) / 2;
            for (int part = 0; part < left / 2; ++part) {
                parts[part * elements + i] =
                    __fadd_rn(parts[part * elements + i], parts[(part + half) * elements + i]);
            }
        }
        sum[i] = Element(parts[i]);
    }
}

template<typename Launch>
void by_type(Dtype dtype, Launch &&launch) {
    switch (dtype) {
    case Dtype::fp16:
        launch(__half());
        break;
    case Dtype::bf16:
        launch(__nv_bfloat16());
        break;
    default:
        launch(float());
    }
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

unsigned blocks(int64_t size, int64_t most) { return unsigned(std::min(size, most)); }

}  // namespace

void fill(const Tensor &tensor, float value, cudaStream_t stream) {
    if (tensor.elements() == 0) { return; }
    const Walk walk = walk_of(tensor);
    const dim3 grid(blocks(walk.sizes[2], INT32_MAX), blocks(walk.sizes[1], kMostBlocks),
        blocks(walk.sizes[0], kMostBlocks));
    by_type(tensor.dtype, [&](auto element) {
        using Element = decltype(element);
        fill_kernel<Element><<<grid, kThreads, 0, stream>>>(tensor.as<Element>(), walk, value);
    });
}

void sum_groups(const Tensor &sum, const void *heads, int num_heads, cudaStream_t stream) {
    if (sum.elements() == 0) { return; }
    const Walk walk = walk_of(sum);
    const dim3 grid(blocks(walk.sizes[1], INT32_MAX), blocks(walk.sizes[2], kMostBlocks),
        blocks(walk.sizes[0], kMostBlocks));
    const int groups = int(num_heads / walk.sizes[2]);
    by_type(sum.dtype, [&](auto element) {
        using Element = decltype(element);
        sum_groups_kernel<Element><<<grid, kThreads, 0, stream>>>(
            sum.as<Element>(), static_cast<const Element *>(heads), walk, groups);
    });
}

void sum_parts(const Tensor &sum, float *parts, int num_parts, cudaStream_t stream) {
    const int64_t elements = sum.elements();
    if (elements == 0) { return; }
    const unsigned grid = blocks((elements + kThreads - 1) / kThreads, 1 << 16);
    by_type(sum.dtype, [&](auto element) {
        using Element = decltype(element);
        sum_parts_kernel<Element>
            <<<grid, kThreads, 0, stream>>>(sum.as<Element>(), parts, elements, num_parts);
    });
}

}  // namespace core
}  // namespace FLASH_NAMESPACE

#include "api/small_kernels.h"

#include <algorithm>
#include <cmath>

#include <cuda_bf16.h>

namespace FLASH_NAMESPACE {
namespace api {

namespace {

constexpr int kThreads = 128;
constexpr int64_t kMostBlocks = 1 << 16;

unsigned blocks_for(int64_t threads) {
    return unsigned(std::min((threads + kThreads - 1) / kThreads, kMostBlocks));
}

template<typename From, typename To>
__global__ void convert_kernel(const From *from, To *to, const int64_t count) {
    const int64_t step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
        to[i] = To(float(from[i]));
    }
}

struct Rows {
    int64_t batch, row, head;  // strides in elements
};

__global__ void copy_rows_kernel(const half *from, const Rows from_rows, const int from_dim, half *to,
    const Rows to_rows, const int to_dim, const int64_t rows, const int heads, const int64_t count) {
    const int64_t step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
        const int element = int(i % to_dim);
        const int head = int(i / to_dim % heads);
        const int64_t row = i / to_dim / heads % rows, batch = i / to_dim / heads / rows;
        to[batch * to_rows.batch + row * to_rows.row + head * to_rows.head + element] = element < from_dim
            ? from[batch * from_rows.batch + row * from_rows.row + head * from_rows.head + element]
            : half(0.f);
    }
}

__global__ void put_random_state_kernel(uint64_t *at, const PhiloxState state) {
    const auto seed_and_offset = unpack(state);
    at[0] = std::get<0>(seed_and_offset);
    at[1] = std::get<1>(seed_and_offset);
}

template<typename From>
__global__ void to_floats_kernel(const From *from, const int64_t stride, float *to, const int64_t count) {
    const int64_t step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
        to[i] = float(from[i * stride]);
    }
}

__global__ void join_sink_kernel(const float *lse, const float *sink, float *joined, const int64_t rows,
    const int64_t heads, const int64_t count) {
    const int64_t step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
        const float own = lse[i], other = sink[i / rows % heads], most = fmaxf(own, other);
        joined[i] = isinf(most) ? most : most + log1pf(expf(-fabsf(own - other)));
    }
}

// A thread block has a head. Its threads go through the rows of each sequence, and then add up by halves.
__global__ void sink_gradient_kernel(
    float *gradient, const float *sink, const float *lse, const float *sums, const SinkRows at) {
    __shared__ float shared[kThreads];
    const int64_t head = blockIdx.x, heads = gridDim.x;
    float total = 0.f;
    for (int64_t b = 0; b < at.sequences; ++b) {
        const bool packed = at.cu_seqlens != nullptr;
        const int64_t first = packed ? at.cu_seqlens[b] : 0,
                      rows = packed ? at.cu_seqlens[b + 1] - first : at.rows,
                      of = packed ? head : b * heads + head;
        const float *const own_lse = lse + of * at.rows + first;
        const float *const own_sums = sums + of * at.sums + first + (packed ? 128 * b : 0);
        for (int64_t i = threadIdx.x; i < rows; i += kThreads) {
            if (own_lse[i] == INFINITY) { continue; }  // no key, so no weight
            total += own_sums[i] / (1.f + expf(own_lse[i] - sink[head]));
        }
    }
    shared[threadIdx.x] = total;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) { shared[threadIdx.x] += shared[threadIdx.x + half]; }
    }
    if (threadIdx.x == 0) { gradient[head] = -shared[0]; }
}

Rows rows_of(const flash_attention_v2_tensor &tensor) {
    return {tensor.strides[0], tensor.strides[1], tensor.strides[2]};
}

template<typename From, typename To>
void convert(const From *from, To *to, int64_t count, cudaStream_t stream) {
    if (count == 0) { return; }
    convert_kernel<<<blocks_for(count), kThreads, 0, stream>>>(from, to, count);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

cudaError_t find_code() {
#ifdef FORK_EMULATED
    return cudaSuccess;
#else
    cudaFuncAttributes found;
    return cudaFuncGetAttributes(&found, put_random_state_kernel);
#endif
}

void to_half(const float *from, half *to, int64_t count, cudaStream_t stream) {
    convert(from, to, count, stream);
}
void to_float(const half *from, float *to, int64_t count, cudaStream_t stream) {
    convert(from, to, count, stream);
}

void copy_rows(
    const flash_attention_v2_tensor &from, const flash_attention_v2_tensor &to, cudaStream_t stream) {
    const int64_t count = to.sizes[0] * to.sizes[1] * to.sizes[2] * to.sizes[3];
    if (count == 0) { return; }
    copy_rows_kernel<<<blocks_for(count), kThreads, 0, stream>>>(static_cast<const half *>(from.data),
        rows_of(from), int(from.sizes[3]), static_cast<half *>(to.data), rows_of(to), int(to.sizes[3]),
        to.sizes[1], int(to.sizes[2]), count);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void to_floats(const void *sink, flash_attention_v2_dtype dtype, int64_t stride, float *to, int64_t heads,
    cudaStream_t stream) {
    if (heads == 0) { return; }
    const auto launch = [&](auto element) {
        using Element = decltype(element);
        to_floats_kernel<<<blocks_for(heads), kThreads, 0, stream>>>(
            static_cast<const Element *>(sink), stride, to, heads);
    };
    switch (dtype) {
    case FLASH_ATTENTION_V2_FLOAT16:
        launch(__half());
        break;
    case FLASH_ATTENTION_V2_BFLOAT16:
        launch(__nv_bfloat16());
        break;
    default:
        launch(float());
    }
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void join_sink(const float *lse, const float *sink, float *joined, int64_t rows, int64_t heads, int64_t count,
    cudaStream_t stream) {
    if (count == 0) { return; }
    join_sink_kernel<<<blocks_for(count), kThreads, 0, stream>>>(lse, sink, joined, rows, heads, count);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void sink_gradient(float *gradient, const float *sink, const float *lse, const float *sums,
    const SinkRows &rows, int64_t heads, cudaStream_t stream) {
    if (heads == 0) { return; }
    sink_gradient_kernel<<<unsigned(heads), kThreads, 0, stream>>>(gradient, sink, lse, sums, rows);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void put_random_state(uint64_t *at, const PhiloxState &state, cudaStream_t stream) {
    put_random_state_kernel<<<1, 1, 0, stream>>>(at, state);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace api
}  // namespace FLASH_NAMESPACE

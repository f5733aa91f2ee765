#include "api/small_kernels.h"

#include <algorithm>

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

void put_random_state(uint64_t *at, const PhiloxState &state, cudaStream_t stream) {
    put_random_state_kernel<<<1, 1, 0, stream>>>(at, state);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace api
}  // namespace FLASH_NAMESPACE

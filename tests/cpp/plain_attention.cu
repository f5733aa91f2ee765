#include "plain_attention.h"

#include <cmath>

namespace plain {

namespace {

constexpr int kThreads = 256;

template<bool Max>
__device__ float reduced(float number) {
    __shared__ float of_warps[kThreads / 32];
    const auto join = [](float a, float b) { return Max ? fmaxf(a, b) : a + b; };
    for (int lane = 16; lane > 0; lane /= 2) { number = join(number, __shfl_xor_sync(~0u, number, lane)); }
    __syncthreads();
    if (threadIdx.x % 32 == 0) { of_warps[threadIdx.x / 32] = number; }
    __syncthreads();
    number = of_warps[0];
    for (int warp = 1; warp < kThreads / 32; ++warp) { number = join(number, of_warps[warp]); }
    return number;
}

// A thread block a row.
__global__ void softmax(half *scores, const int length, const bool causal) {
    half *const row = scores + size_t(blockIdx.x) * length;
    const int end = causal ? int(blockIdx.x % length) + 1 : length;
    float most = -INFINITY;
    for (int i = threadIdx.x; i < end; i += kThreads) { most = fmaxf(most, __half2float(row[i])); }
    most = reduced<true>(most);
    float sum = 0.f;
    for (int i = threadIdx.x; i < end; i += kThreads) { sum += __expf(__half2float(row[i]) - most); }
    sum = reduced<false>(sum);
    for (int i = threadIdx.x; i < length; i += kThreads) {
        row[i] = __float2half(i < end ? __expf(__half2float(row[i]) - most) / sum : 0.f);
    }
}

// by_scores holds gradients of probabilities, and then those of scores.
__global__ void softmax_backward(const half *probabilities, half *by_scores, const int length) {
    const half *const p = probabilities + size_t(blockIdx.x) * length;
    half *const row = by_scores + size_t(blockIdx.x) * length;
    float sum = 0.f;
    for (int i = threadIdx.x; i < length; i += kThreads) { sum += __half2float(p[i]) * __half2float(row[i]); }
    sum = reduced<false>(sum);
    for (int i = threadIdx.x; i < length; i += kThreads) {
        row[i] = __float2half(__half2float(p[i]) * (__half2float(row[i]) - sum));
    }
}

// Row-major c (rows x columns) = scale a b, for each head. turned: it lies as its transpose.
bool product(cublasHandle_t blas, const Size &size, int rows, int columns, int inner, float scale,
    const half *a, bool a_turned, const half *b, bool b_turned, half *c) {
    const float zero = 0.f;
    const int count = size.batch * size.heads;
    // cuBLAS counts by columns: it finds the transpose of c from those of b and a.
    return cublasGemmStridedBatchedEx(blas, b_turned ? CUBLAS_OP_T : CUBLAS_OP_N,
               a_turned ? CUBLAS_OP_T : CUBLAS_OP_N, columns, rows, inner, &scale, b, CUDA_R_16F,
               b_turned ? inner : columns, (long long)inner * columns, a, CUDA_R_16F, a_turned ? rows : inner,
               (long long)rows * inner, &zero, c, CUDA_R_16F, columns, (long long)rows * columns, count,
               CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT)
        == CUBLAS_STATUS_SUCCESS;
}

}  // namespace

bool forward(cublasHandle_t blas, const Size &size, const half *q, const half *k, const half *v, half *out,
    half *probabilities) {
    const int n = size.length, d = size.dim;
    const float scale = 1.f / std::sqrt(float(d));
    cudaStream_t stream = nullptr;
    if (cublasGetStream(blas, &stream) != CUBLAS_STATUS_SUCCESS) { return false; }
    if (!product(blas, size, n, n, d, scale, q, false, k, true, probabilities)) { return false; }
    softmax<<<size.batch * size.heads * n, kThreads, 0, stream>>>(probabilities, n, size.causal);
    return cudaGetLastError() == cudaSuccess
        && product(blas, size, n, d, n, 1.f, probabilities, false, v, false, out);
}

bool backward(cublasHandle_t blas, const Size &size, const half *q, const half *k, const half *v,
    const half *dout, half *dq, half *dk, half *dv, const half *probabilities, half *by_scores) {
    const int n = size.length, d = size.dim;
    const float scale = 1.f / std::sqrt(float(d));
    cudaStream_t stream = nullptr;
    if (cublasGetStream(blas, &stream) != CUBLAS_STATUS_SUCCESS) { return false; }
    if (!product(blas, size, n, d, n, 1.f, probabilities, true, dout, false, dv)) { return false; }
    if (!product(blas, size, n, n, d, 1.f, dout, false, v, true, by_scores)) { return false; }
    softmax_backward<<<size.batch * size.heads * n, kThreads, 0, stream>>>(probabilities, by_scores, n);
    return cudaGetLastError() == cudaSuccess
        && product(blas, size, n, d, n, scale, by_scores, false, k, false, dq)
        && product(blas, size, n, d, n, scale, by_scores, true, q, false, dk);
}

}  // namespace plain

// Attention as a program writes it with cuBLAS: two products of matrices and a softmax between them, and as
// many again in reverse. All scores are in memory, in half precision.

#pragma once

#include <cublas_v2.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

namespace plain {

struct Size {
    int batch, heads, length, dim;
    bool causal;
    size_t scores() const { return size_t(batch) * heads * length * length; }
};

// q, k, v, out and gradients: [batch, heads, length, dim]. probabilities and by_scores: Size::scores()
// halves, the second for backward alone. False: cuBLAS or a launch failed.
bool forward(cublasHandle_t blas, const Size &size, const half *q, const half *k, const half *v, half *out,
    half *probabilities);
bool backward(cublasHandle_t blas, const Size &size, const half *q, const half *k, const half *v,
    const half *dout, half *dq, half *dk, half *dv, const half *probabilities, half *by_scores);

}  // namespace plain

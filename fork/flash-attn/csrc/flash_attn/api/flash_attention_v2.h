// Attention on NVIDIA GPUs for C++: float16 tensors of one length, forward and backward, in one line each.
// All else, such as bfloat16, grouped heads, packed sequences, caches and masks, is in
// flash_attention_v2_c.h, which this includes. docs/cpp.md is the reference.

#ifndef FLASH_ATTENTION_V2_H
#define FLASH_ATTENTION_V2_H

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "flash_attention_v2_c.h"

struct FlashAttentionV2Config {
    int batch_size;
    int seq_len;
    int num_heads;
    int head_dim;             // a multiple of 8, up to 256
    bool use_causal_mask;     // a position sees none after it
    float dropout_rate;       // the share of probabilities that are dropped, from 0 to below 1
    unsigned long long seed;  // of dropout; the same in backward as in forward
};

// Where the elements of q, k, v, o and their gradients lie, in the functions below.
enum class FlashAttentionV2Layout {
    batch_seq_heads_dim,  // [batch, seq_len, num_heads, head_dim]: the default
    batch_heads_seq_dim,  // [batch, num_heads, seq_len, head_dim]
};

// For the whole process.
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_set_layout(FlashAttentionV2Layout layout);

// Whether every field is in its range. Which head dims a build has, flash_attention_v2_has_kernels tells.
FLASH_ATTENTION_V2_API bool is_config_valid(const FlashAttentionV2Config &config);

// o = softmax(q k^T / sqrt(head_dim)) v, for each sequence and head.
//
// l: the log-sum-exp of each row of scores, [batch, num_heads, seq_len], rounded to half. Backward from it is
// less exact than from the float32 of flash_attention_v2_run_forward: docs/cpp.md has figures.
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_forward(const half *q, const half *k, const half *v,
    half *o, half *l, const FlashAttentionV2Config &config, cudaStream_t stream = nullptr);

// Gradients of forward's q, k and v, from do_grad, that of o. o and l: what forward wrote.
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_backward(const half *q, const half *k, const half *v,
    const half *o, const half *l, const half *do_grad, half *dq, half *dk, half *dv,
    const FlashAttentionV2Config &config, cudaStream_t stream = nullptr);

#endif

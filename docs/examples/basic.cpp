// Attention in half precision in one call: the example of the documented interface, with data.

#include "flash_attention_v2.h"
#include <cuda_runtime.h>

#include <cstdio>
#include <vector>

int main() {
    // Configuration
    FlashAttentionV2Config config;
    config.batch_size = 1;
    config.seq_len = 512;
    config.num_heads = 8;
    config.head_dim = 64;
    config.use_causal_mask = true;
    config.dropout_rate = 0.1f;
    config.seed = 42;

    // Optional: it says at once where there is no GPU
    if (flash_attention_v2_init() != cudaSuccess) {
        printf("Error: %s\n", flash_attention_v2_last_error());
        return 1;
    }

    // Allocate device memory
    size_t total_size = config.batch_size * config.seq_len * 
                       config.num_heads * config.head_dim;
    half *d_q, *d_k, *d_v, *d_o, *d_l;
    
    cudaMalloc(&d_q, total_size * sizeof(half));
    cudaMalloc(&d_k, total_size * sizeof(half));
    cudaMalloc(&d_v, total_size * sizeof(half));
    cudaMalloc(&d_o, total_size * sizeof(half));
    cudaMalloc(&d_l, config.batch_size * config.num_heads * 
               config.seq_len * sizeof(half));

    // Copy input data: here the same numbers for q, k and v
    std::vector<half> numbers(total_size);
    for (size_t i = 0; i < total_size; ++i) { numbers[i] = __float2half(float(i * 37 % 101) / 50.f - 1.f); }
    for (half *to : {d_q, d_k, d_v}) {
        cudaMemcpy(to, numbers.data(), total_size * sizeof(half), cudaMemcpyHostToDevice);
    }
    
    // Execute forward pass
    cudaError_t err = flash_attention_v2_forward(
        d_q, d_k, d_v, d_o, d_l, config
    );
    
    if (err != cudaSuccess) {
        printf("Error: %s\n", cudaGetErrorString(err));
        printf("%s\n", flash_attention_v2_last_error());  // in words
        return 1;
    }

    // Use results: the copy waits for them
    std::vector<half> out(total_size);
    cudaMemcpy(out.data(), d_o, total_size * sizeof(half), cudaMemcpyDeviceToHost);
    printf("out[0][511][7]: %.4f %.4f %.4f …\n", __half2float(out[total_size - 64]),
           __half2float(out[total_size - 63]), __half2float(out[total_size - 62]));
    
    // Cleanup
    cudaFree(d_q);
    cudaFree(d_k);
    cudaFree(d_v);
    cudaFree(d_o);
    cudaFree(d_l);
    
    return 0;
}

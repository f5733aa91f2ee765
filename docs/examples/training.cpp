// Forward and backward in bfloat16, with grouped heads and the deterministic mode: one call of two sequences
// has the bits of two calls of one. The program checks that.

#include "flash_attention_v2.h"

#include <cuda_bf16.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kTokens = 192, kHeads = 8, kKeyHeads = 2, kDim = 64;

void check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) { return; }
    std::fprintf(stderr, "%s: %s: %s\n", what, cudaGetErrorString(status), flash_attention_v2_last_error());
    std::exit(1);
}

// (sequences, kTokens, heads, kDim), filled with numbers between -1 and 1.
flash_attention_v2_tensor rows(int64_t sequences, int64_t heads) {
    flash_attention_v2_tensor made{nullptr, FLASH_ATTENTION_V2_BFLOAT16, 4, {sequences, kTokens, heads, kDim},
        {kTokens * heads * kDim, heads * kDim, kDim, 1}};
    std::vector<__nv_bfloat16> content(size_t(sequences * made.strides[0]));
    for (size_t i = 0; i < content.size(); ++i) {
        content[i] = __float2bfloat16(float(i * 37 % 101) / 50.f - 1.f);
    }
    check(cudaMalloc(&made.data, content.size() * 2), "cudaMalloc");
    check(cudaMemcpy(made.data, content.data(), content.size() * 2, cudaMemcpyHostToDevice), "cudaMemcpy");
    return made;
}

flash_attention_v2_tensor first_sequence(flash_attention_v2_tensor of) {
    of.sizes[0] = 1;
    return of;
}

std::vector<char> bytes_of_first(const flash_attention_v2_tensor &of) {
    std::vector<char> made(size_t(of.strides[0]) * 2);
    check(cudaMemcpy(made.data(), of.data, made.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return made;
}

}  // namespace

int main() {
    check(flash_attention_v2_set_deterministic(1, 0), "deterministic mode");
    flash_attention_v2_forward_call forward;
    flash_attention_v2_backward_call backward;
    check(flash_attention_v2_forward_defaults(&forward, sizeof(forward)), "defaults");
    check(flash_attention_v2_backward_defaults(&backward, sizeof(backward)), "defaults");
    forward.options.causal = backward.options.causal = 1;
    forward.q = backward.q = rows(2, kHeads);
    forward.k = backward.k = rows(2, kKeyHeads);
    forward.v = backward.v = rows(2, kKeyHeads);
    forward.out = backward.out = rows(2, kHeads);
    forward.lse = {
        nullptr, FLASH_ATTENTION_V2_FLOAT32, 3, {2, kHeads, kTokens}, {kHeads * kTokens, kTokens, 1}};
    check(cudaMalloc(&forward.lse.data, 2 * kHeads * kTokens * sizeof(float)), "cudaMalloc");
    backward.lse = forward.lse;
    backward.dout = rows(2, kHeads);
    backward.dq = rows(2, kHeads);
    backward.dk = rows(2, kKeyHeads);
    backward.dv = rows(2, kKeyHeads);
    check(flash_attention_v2_run_forward(&forward, nullptr), "forward");
    check(flash_attention_v2_run_backward(&backward, nullptr), "backward");
    const std::vector<char> out = bytes_of_first(forward.out), dk = bytes_of_first(backward.dk);

    for (auto *of : {&forward.q, &forward.k, &forward.v, &forward.out, &forward.lse, &backward.q, &backward.k,
             &backward.v, &backward.out, &backward.lse, &backward.dout, &backward.dq, &backward.dk,
             &backward.dv}) {
        *of = first_sequence(*of);
    }
    check(flash_attention_v2_run_forward(&forward, nullptr), "forward, alone");
    check(flash_attention_v2_run_backward(&backward, nullptr), "backward, alone");
    const bool same = out == bytes_of_first(forward.out) && dk == bytes_of_first(backward.dk);
    std::printf("the first sequence %s the bits that it has beside another\n", same ? "has" : "LACKS");
    for (const auto &of : {forward.q, forward.k, forward.v, forward.out, forward.lse, backward.dout,
             backward.dq, backward.dk, backward.dv}) {
        cudaFree(of.data);
    }
    return same ? 0 : 1;
}

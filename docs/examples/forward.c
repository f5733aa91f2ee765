/* Causal attention from C, with the float32 log-sum-exp. The first token sees itself alone, so its row of the
 * result is its value: the program checks that. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "flash_attention_v2_c.h"

enum { TOKENS = 128, HEADS = 4, DIM = 64, COUNT = TOKENS * HEADS * DIM };

static void check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) { return; }
    const char *words = flash_attention_v2_last_error();
    fprintf(stderr, "%s: error %d (%s): %s\n", what, (int)status, cudaGetErrorString(status), words);
    exit(1);
}

static flash_attention_v2_tensor rows(const uint16_t *content) {
    flash_attention_v2_tensor made = {0};
    made.dtype = FLASH_ATTENTION_V2_FLOAT16;
    made.rank = 4;
    int64_t stride = 1;
    const int64_t sizes[] = {1, TOKENS, HEADS, DIM};
    for (int i = 3; i >= 0; stride *= sizes[i--]) { made.sizes[i] = sizes[i], made.strides[i] = stride; }
    check(cudaMalloc(&made.data, COUNT * sizeof(uint16_t)), "cudaMalloc");
    if (content != NULL) {
        check(cudaMemcpy(made.data, content, COUNT * sizeof(uint16_t), cudaMemcpyHostToDevice), "cudaMemcpy");
    }
    return made;
}

int main(void) {
    static uint16_t numbers[COUNT], out[COUNT];
    static float lse[HEADS][TOKENS];
    for (int i = 0; i < COUNT; ++i) { numbers[i] = (uint16_t)(0x3000 + i * 37 % 0x0c00); } /* 0.125 to 1 */

    flash_attention_v2_forward_call call;
    check(flash_attention_v2_forward_defaults(&call, sizeof(call)), "defaults");
    call.options.causal = 1;
    call.q = rows(numbers);
    call.k = rows(numbers);
    call.v = rows(numbers);
    call.out = rows(NULL);
    call.lse.dtype = FLASH_ATTENTION_V2_FLOAT32;
    call.lse.rank = 3;
    call.lse.sizes[0] = 1, call.lse.sizes[1] = HEADS, call.lse.sizes[2] = TOKENS;
    call.lse.strides[0] = HEADS * TOKENS, call.lse.strides[1] = TOKENS, call.lse.strides[2] = 1;
    check(cudaMalloc(&call.lse.data, sizeof(lse)), "cudaMalloc");

    check(flash_attention_v2_run_forward(&call, NULL), "forward");

    check(cudaMemcpy(out, call.out.data, sizeof(out), cudaMemcpyDeviceToHost), "out");
    check(cudaMemcpy(lse, call.lse.data, sizeof(lse), cudaMemcpyDeviceToHost), "lse");
    for (int i = 0; i < HEADS * DIM; ++i) {
        if (out[i] != numbers[i]) { return fprintf(stderr, "the first row is not its value\n"), 1; }
    }
    printf("lse of the last token: %.3f, %.3f, %.3f, %.3f\n", lse[0][TOKENS - 1], lse[1][TOKENS - 1],
        lse[2][TOKENS - 1], lse[3][TOKENS - 1]);
    flash_attention_v2_tensor *const all[] = {&call.q, &call.k, &call.v, &call.out, &call.lse};
    for (int i = 0; i < 5; ++i) { cudaFree(all[i]->data); }
    return 0;
}

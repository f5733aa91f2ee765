// Kernels that are wrong in one way each, and one that is right: what the emulator must say of them.
#include <cmath>
#include <cstdio>
#include <cstring>

#include <cuda_fp16.h>

constexpr int kSize = 1024;

__device__ float half_of_block(const float *data, bool wait) {
    __shared__ float shared[64];
    shared[threadIdx.x] = data[threadIdx.x];
    if (wait) { __syncthreads(); }
    return shared[63 - threadIdx.x];  // what another warp wrote
}

__global__ void right(float *data) { data[64 + threadIdx.x] = half_of_block(data, true); }
__global__ void race(float *data) { data[64 + threadIdx.x] = half_of_block(data, false); }
__global__ void beyond(float *data) { data[kSize + threadIdx.x] = 1.f; }
__global__ void misaligned(float *data) { reinterpret_cast<float2 *>(data + 1)[0] = make_float2(1.f, 2.f); }
__global__ void absent(float *data) {
    if (threadIdx.x < 16) { __syncthreads(); }
    data[64 + threadIdx.x] = 1.f;
}

// Odd lanes come to the barrier by a way that lies behind it.
__global__ void late(float *data) {
    asm volatile("{\n"
                 ".reg .pred odd;\n"
                 "setp.ne.u32 odd, %0, 0;\n"
                 "@odd bra BEHIND;\n"
                 "BARRIER: bar.sync 0;\n"
                 "bra DONE;\n"
                 "BEHIND: bra BARRIER;\n"
                 "DONE:\n"
                 "}\n" :: "r"(threadIdx.x % 2) : "memory");
    data[64 + threadIdx.x] = 1.f;
}

// What all lanes of a block vote for, of which the second warp has one.
__global__ void vote(float *data) {
    const int any = __syncthreads_or(threadIdx.x == 40), none = __syncthreads_or(threadIdx.x == 64);
    const int all = __syncthreads_and(threadIdx.x < 64), not_all = __syncthreads_and(threadIdx.x != 3);
    const int count = __syncthreads_count(threadIdx.x % 3 == 0);  // 22 of 64
    data[64 + threadIdx.x] = float(any && !none && all && !not_all && count == 22);
}

template<bool Wait>
__global__ void copy(float *data) {
    __shared__ alignas(16) float shared[4];
    if (threadIdx.x == 0) {
        const unsigned to = unsigned(__cvta_generic_to_shared(shared));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n cp.async.commit_group;" :: "r"(to), "l"(data) : "memory");
        if (Wait) { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
        data[64] = shared[3];
    }
}

// What a warp's lanes hold after a shuffle, a vote and integer and half arithmetic, against the same by plain loops in main.
__global__ void arithmetic(float *data) {
    const int lane = threadIdx.x;
    const int other = __shfl_xor_sync(0xffffffffu, lane * lane, 5);
    const unsigned odd = __ballot_sync(0xffffffffu, lane & 1);
    const int shifted = (lane - 40) >> 2;
    data[64 + lane] = float(other + int(odd >> 28) + shifted) + float(lane) / 3.f;
}

// A matrix of rows and keys times a diagonal of twos, and the largest of two halves each; how many lanes got something else.
__global__ void product(float *data) {
    const int lane = threadIdx.x, row = lane / 4, key = lane % 4 * 2;
    const auto pair = [](const float x, const float y) {
        const __half2 halves = __floats2half2_rn(x, y);
        return reinterpret_cast<const unsigned &>(halves);
    };
    const unsigned upper = pair(row * 10 + key, row * 10 + key + 1), lower = pair(row * 10 + 80 + key, row * 10 + 80 + key + 1);
    const unsigned diagonal = pair(key == row ? 2 : 0, key + 1 == row ? 2 : 0);
    float sums[4] = {1, 2, 3, 4};
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(upper), "r"(lower), "r"(diagonal));
    bool wrong = false;
    for (int n = 0; n < 4; ++n) { wrong = wrong || sums[n] != n + 1 + 2 * (row * 10 + n / 2 * 80 + key + n % 2); }
    unsigned size, known, either;
    asm("abs.f16x2 %0, %1;" : "=r"(size) : "r"(pair(-3, 5)));
    asm("max.f16x2 %0, %1, %2;" : "=r"(known) : "r"(pair(NAN, -INFINITY)), "r"(pair(-7, 2)));
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(either) : "r"(0x7fc0bf80), "r"(0x3f800000));
    wrong = wrong || size != pair(3, 5) || known != pair(-7, 2) || (either & 0xffff) != 0 || either >> 16 < 0x7f81;
    data[64] = __popc(__ballot_sync(0xffffffffu, wrong));
}

// Sums of products and a number as tensor cores round them, which differ from sums one after the other; how many are something else.
__global__ void sums(float *data) {
    const int lane = threadIdx.x;
    const auto sum = [&](const unsigned a, const unsigned b, const float c, const bool bfloat) {  // two products: row 0 by column 0
        const unsigned zero = 0;
        float d[4] = {lane ? 0.f : c, 0, 0, 0};
        if (bfloat) {
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %6, %6}, {%5, %6}, {%0, %1, %2, %3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(lane ? 0 : a), "r"(lane ? 0 : b), "r"(zero));
        } else {
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %6, %6, %6}, {%5, %6}, {%0, %1, %2, %3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(lane ? 0 : a), "r"(lane ? 0 : b), "r"(zero));
        }
        return d[0];
    };
    const unsigned one = 0x3c00, largest = 0x7bff, least = 1;  // 1, 65504 and 2**-24 in float16
    const unsigned both = largest | (largest | 0x8000) << 16, ones = one | one << 16, large = 0x7f00;  // 2**127 in bfloat16
    const struct { unsigned a, b; float c, expected; bool bfloat; } cases[] = {
        {one, one, 0x1.8p-24f, 1.f, false},                 // cut off, not rounded to 1 + 2**-23
        {one, one, -0x1.8p-24f, 1.f - 0x1p-23f, false},     // 25 bits are kept
        {one | 0x8000, one, -0x1.8p-24f, -1.f, false},      // towards 0, the sum
        {one, one, -0x1p-26f, 1.f, false},                  // and what goes into it
        {0x3e00, 0x3e00, -0x1p-25f, 2.25f - 0x1p-22f, false},  // 1.5 squared has the exponent of 1
        {both, ones, 1.f + 0x1p-9f, 1.f + 0x1p-9f, false},  // at once: one after the other, 65505 leaves no 2**-9
        {both, ones, 1.f + 0x1p-11f, 1.f, false},           // 25 bits below 2**15
        {largest, 0, 0x1.234568p-20f, 0x1.234568p-20f, false},  // a product of zero leaves all bits
        {least, least, 0, 0x1p-48f, false},                 // of subnormal numbers
        {least, one, 0x1p-24f, 0x1p-23f, false},
        {0x0001, 0x3f80, 0x1p-133f, 0x1p-132f, true},       // the least of bfloat16
        {large, large, 1.f, INFINITY, true},
        {large | (large | 0x8000) << 16, large | large << 16, 3.f, 0.f, true},  // 2**254 less itself; 3 is far below
        {0x7c00, one, 1.f, INFINITY, false},
        {one, one, -INFINITY, -INFINITY, false},
    };
    bool wrong = false;
    for (const auto &one_case : cases) {
        const float got = sum(one_case.a, one_case.b, one_case.c, one_case.bfloat);
        wrong |= (lane == 0) & (__float_as_uint(got) != __float_as_uint(one_case.expected));
    }
    const float none = sum(0x7c00, 0, 1.f, false);
    wrong |= (lane == 0) & (__float_as_uint(none) != 0x7fffffff);
    data[64] = __popc(__ballot_sync(0xffffffffu, wrong));
}

// 2**-26 times 2**26 where ptxas fuses the product, as it may unless a rounding is named, and 0 where the product is rounded.
template<bool Rounded>
__global__ void square(float *data) {
    const float factor = 1.f + data[1] * 0x1p-13f, rest = 1.f + data[1] * 0x1p-12f;
    float product, difference;
    if (Rounded) {
        asm("mul.rn.f32 %0, %1, %1;" : "=f"(product) : "f"(factor));
    } else {
        asm("mul.f32 %0, %1, %1;" : "=f"(product) : "f"(factor));
    }
    asm("sub.f32 %0, %1, %2;" : "=f"(difference) : "f"(product), "f"(rest));
    data[64 + threadIdx.x] = difference * 0x1p26f;
}

int main(int, char **arguments) {
    float *data = nullptr;
    cudaMalloc(&data, kSize * sizeof(float));
    for (int n = 0; n < kSize; ++n) { data[n] = float(n); }
    const char *name = arguments[1];
    const dim3 block(!std::strcmp(name, "arithmetic") || !std::strcmp(name, "product") || !std::strcmp(name, "sums") || !std::strcmp(name, "absent") ? 32 : 64);
    if (!std::strcmp(name, "right")) { right<<<1, block>>>(data); }
    if (!std::strcmp(name, "race")) { race<<<1, block>>>(data); }
    if (!std::strcmp(name, "beyond")) { beyond<<<1, block>>>(data); }
    if (!std::strcmp(name, "misaligned")) { misaligned<<<1, block>>>(data); }
    if (!std::strcmp(name, "absent")) { absent<<<1, block>>>(data); }
    if (!std::strcmp(name, "late")) { late<<<1, block>>>(data); }
    if (!std::strcmp(name, "vote")) { vote<<<1, block>>>(data); }
    if (!std::strcmp(name, "copied")) { copy<true><<<1, block>>>(data); }
    if (!std::strcmp(name, "unwaited")) { copy<false><<<1, block>>>(data); }
    if (!std::strcmp(name, "arithmetic")) { arithmetic<<<1, block>>>(data); }
    if (!std::strcmp(name, "product")) { product<<<1, block>>>(data); }
    if (!std::strcmp(name, "sums")) { sums<<<1, block>>>(data); }
    if (!std::strcmp(name, "fused")) { square<false><<<1, block>>>(data); }
    if (!std::strcmp(name, "rounded")) { square<true><<<1, block>>>(data); }
    if (!std::strcmp(name, "lowered")) {
        for (const int limit : {60000, 70000, 50000}) { cudaFuncSetAttribute(right, cudaFuncAttributeMaxDynamicSharedMemorySize, limit); }
    }
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        std::puts(cudaGetErrorString(error));
        return 1;
    }
    if (!std::strcmp(name, "arithmetic")) {
        for (int lane = 0; lane < 32; ++lane) {
            const float expected = float((lane ^ 5) * (lane ^ 5) + 0xa + ((lane - 40) >> 2)) + float(lane) / 3.f;
            if (data[64 + lane] - expected > 1e-4f || expected - data[64 + lane] > 1e-4f) {
                std::printf("lane %d: %f, not %f\n", lane, data[64 + lane], expected);
                return 1;
            }
        }
    }
    std::printf("%f\n", data[64]);
    cudaFree(data);
    return 0;
}

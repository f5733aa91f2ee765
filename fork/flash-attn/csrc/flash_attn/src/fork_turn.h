// Turns: thread blocks that take from and add to the same memory, one after another.

#pragma once

#include "namespace_config.h"

namespace FLASH_NAMESPACE {
namespace fork_turn {

#ifdef __CUDACC__

// The next ticket that nobody took, of a launch. So whoever has an earlier one is running or done, and nobody
// waits for a thread block that has not begun. Call it before shared memory is in use.
__forceinline__ __device__ int take_ticket(int *next) {
    extern __shared__ char smem_[];
    int *shared = reinterpret_cast<int *>(smem_);
    if (threadIdx.x == 0) { *shared = atomicAdd(next, 1); }
    __syncthreads();
    const int ticket = *shared;
    __syncthreads();
    return ticket;
}

// The thread that calls it goes on when the turn has come to that position, or past it.
__forceinline__ __device__ void await(const int *turn, const int position) {
    int now;
    do {
        asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now < position);
}

// With what the calling thread, and those that it met at a barrier, have written.
__forceinline__ __device__ void pass_on(int *turn, const int position) {
    asm volatile("red.release.gpu.global.max.s32 [%0], %1;" ::"l"(turn), "r"(position + 1) : "memory");
}

#endif

}  // namespace fork_turn
}  // namespace FLASH_NAMESPACE

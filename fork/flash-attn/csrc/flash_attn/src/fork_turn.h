// Turns: thread blocks that take from and add to the same memory, one after another.

#pragma once

#include <cstdio>

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

// How far a turn has come.
__forceinline__ __device__ int passed(const int *turn) {
    int position;
    asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(position) : "l"(turn) : "memory");
    return position;
}

// Time in units of 2^32 ns, about four seconds.
__forceinline__ __device__ unsigned now() {
    unsigned time;
    asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(time));
    return time;
}

// Whether a thread block of this launch has given a wait up.
__forceinline__ __device__ bool is_given_up(const int *given_up) {
    int is;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(is) : "l"(given_up) : "memory");
    return is != 0;
}

// Goes on when the turn has come to that position, or past it. Turns mostly come within microseconds; a poll
// takes about one. One that cannot come, as where lengths change under the call or calls of two streams share
// scratch, would hang the GPU. So where no turn was passed on for `limit` times 2^32 ns (0: no limit), the
// call's waits are given up, all of them, and its results are lost. One thread of a block calls it; all have
// registers for it, so it has few.
__forceinline__ __device__ void await(
    const int *turn, const int position, int *given_up, const unsigned limit) {
    int last = passed(turn);
    if (last >= position) { return; }
    unsigned since = now();
    #pragma unroll 1
    for (int come = passed(turn); come < position && !is_given_up(given_up); come = passed(turn)) {
        const unsigned time = now();
        if (come != last) {
            last = come;
            since = time;
        } else if (time != since) {
            if (limit != 0 && time - since > limit) {
                asm volatile("st.relaxed.gpu.global.b32 [%0], 1;" ::"l"(given_up) : "memory");
            }
            __nanosleep(500);
        }
    }
}

// Of a launch that comes after: says that a wait was given up, and ends the call. printf, were it called
// where the wait is, would take registers from the kernel that waits.
__forceinline__ __device__ void end_if_given_up(const int *given_up) {
    if (!is_given_up(given_up)) { return; }
    printf(
        "flash-attn: a thread block waited for a turn that does not come: the call's lengths changed while "
        "it ran, or calls of two streams share a workspace. FA2_WAIT_LIMIT sets the seconds of such a "
        "wait; 0: no limit.\n");
    __trap();
}

// With what the calling thread, and those that it met at a barrier, have written.
__forceinline__ __device__ void pass_on(int *turn, const int position) {
    asm volatile("red.release.gpu.global.max.s32 [%0], %1;" ::"l"(turn), "r"(position + 1) : "memory");
}

#endif

}  // namespace fork_turn
}  // namespace FLASH_NAMESPACE

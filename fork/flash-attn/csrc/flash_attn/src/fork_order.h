// The order in which thread blocks add to a row's dQ in deterministic mode.
//
// A block of queries gets a summand from each block of keys that it may see. They are added from the first
// block of keys to the last, whatever runs them when: a counter for each block of queries says whose turn it
// is. Which blocks of keys those are follows from the row's own sequence.
//
// Nobody waits for a thread block that has not begun: a block of keys is not the one that blockIdx names but
// the next that nobody took, so all before it are running or done.
//
// Nor does anybody wait for ever, whatever cu_seqlens holds; where it changes while a call runs, fork_turn.h
// ends the wait. A counter only grows, and who waits for a position goes on at a later one too: once the
// thread block of the position before has passed its turn on, nothing can take that back. So where sequences
// overlap and share counters, sums come in some order; and a counter past the last is the last.

#pragma once

#include <algorithm>
#include <type_traits>

#ifdef __CUDACC__
#include <cute/tensor.hpp>
#endif

#include "namespace_config.h"
#include "block_info.h"
#include "flash.h"
#include "fork_turn.h"

namespace FLASH_NAMESPACE {
namespace fork_order {

// A sequence's counters begin where its rows do, one for the fewest rows that a block of queries has, and one
// later for each sequence before it: so those of neighbours never meet.
constexpr int kRows = 64;

// How thread blocks walk the blocks of keys of a call's columns, which are heads of sequences. Column c
// begins in period c with its first dq_together blocks of keys, and with the next so many dq_periods later.
// So a period has a block of keys of each place: periods are alike, also where masks are causal and later
// blocks of keys have fewer steps. Those of one column begin kApart steps after one another: late enough not
// to wait for their turn, and early enough to find the same queries in the L2 cache. On an H100 1.5 to 2.2
// steps took least.
//
// Returns the grid of thread blocks that take part, as many a column in x as it has blocks of keys. Some find
// nothing to do, for the first and the last periods have places without a column, and the grid is rounded up:
// at most as many as the others where there are 32 columns or more.
inline dim3 walk(Flash_bwd_params &params, const int num_sm, const int num_m_block, const int num_n_block,
    const bool is_causal) {
    constexpr float kApart = 1.7f;
    const int columns = params.b * params.h;
    // Steps that each multiprocessor takes in a period
    const float period = std::max(1.f, float(num_m_block) * num_n_block) / (is_causal ? 2 : 1) / num_sm;
    const auto nearest = [](const float number, const int most) {
        return int(std::max(1.f, std::min(number + 0.5f, float(most))));
    };
    const auto parts = [](const int whole, const int part) { return (whole + part - 1) / part; };
    const int wanted = std::max(nearest(period / kApart, num_n_block), parts(4 * num_n_block, columns));
    // As wanted, and all nearly the same
    const int together = parts(num_n_block, parts(num_n_block, std::min(wanted, num_n_block)));
    const int runs = parts(num_n_block, together);
    params.fork_bwd.dq_together = together;
    params.fork_bwd.dq_periods =
        together > 1 ? 1 : nearest(kApart / period, columns / (8 * std::max(1, runs - 1)));
    const int64_t tickets = (columns + int64_t(runs - 1) * params.fork_bwd.dq_periods) * runs * together;
    dim3 grid(num_n_block, params.b, params.h);
    // The shorter side has room for more.
    unsigned &more = params.b < params.h ? grid.y : grid.z;
    const int64_t others = int64_t(num_n_block) * (params.b < params.h ? params.h : params.b);
    more = unsigned((tickets + others - 1) / others);
    return grid;
}

struct Place {
    int column, n_block;
};

// What a ticket of a walk stands for; n_blocks or more where that is nothing.
__host__ __device__ __forceinline__ Place place_of(
    const Flash_bwd_params &params, const int n_blocks, const int ticket) {
    const int together = params.fork_bwd.dq_together, runs = (n_blocks + together - 1) / together;
    const int period = ticket / (runs * together), place = ticket % (runs * together);
    const int column = period - place % runs * params.fork_bwd.dq_periods;
    return {column,
        column >= 0 && column < params.b * params.h ? place % runs * together + place / runs : n_blocks};
}

#ifdef __CUDACC__

// The block of keys of this thread block, and whose; past the last where its ticket stands for nothing.
__forceinline__ __device__ int first_block(const Flash_bwd_params &params, int &bidb, int &bidh) {
    const Place place = place_of(params, gridDim.x, fork_turn::take_ticket(params.fork_bwd.dq_ticket));
    bidb = place.column % params.b;
    bidh = place.column / params.b;
    return place.n_block;
}

// Of the launch that comes after the sums: fork_turn.h. Its message takes registers.
__forceinline__ __device__ void end_if_given_up(const Flash_bwd_params &params) {
    if (threadIdx.x + blockIdx.x + blockIdx.y + blockIdx.z == 0) {
        fork_turn::end_if_given_up(params.fork_bwd.dq_ticket + 1);
    }
}

// Whose turn it is at a block of queries, and which position the thread block's block of keys has there.
template<bool Is_local>
struct Turn {
    int *turn;
    int position;

    __forceinline__ __device__ Turn(const Flash_bwd_params &params, const int bidb, const int bidh,
        const int n_block, const int m_block, const int kBlockM, const int kBlockN) {
        const BlockInfo</*Varlen=*/true> binfo(params, bidb);
        // In 32 bits: no call has 2^32 rows. Unsigned, so that no cu_seqlens leads before the first counter.
        const uint32_t first = binfo.q_offset(uint32_t(params.seqlen_q_rounded), uint32_t(1), bidb) / kRows;
        const uint32_t last = uint32_t(params.fork_bwd.dq_turns_head_stride) - 1;
        turn = params.fork_bwd.dq_turns + bidh * params.fork_bwd.dq_turns_head_stride
            + std::min(first + bidb + m_block, last);
        // Without a left edge all blocks of keys before this one come first; with one, those that the
        // kernel's m_block_max lets reach the query block.
        const int first_key = Is_local
            ? m_block * kBlockM + binfo.actual_seqlen_k - binfo.actual_seqlen_q - params.window_size_left
            : 0;
        position = n_block - (first_key > 0 ? first_key / kBlockN : 0);
    }
};

// Kernels that are compiled for turns and ask whether a call has them.
template<typename Kernel_traits>
constexpr bool kAsksForTurns = false;

template<typename Kernel_traits, bool Ordered>
__forceinline__ __device__ bool by_turns(const Flash_bwd_params &params) {
    return Ordered && (!kAsksForTurns<Kernel_traits> || params.fork_bwd.dq_turns != nullptr);
}

// Where a thread's sums of dQ lie; where they are read again it is the same. Four in a row make one
// instruction from compute capability 9.0 on. Before, neighbouring threads have neighbouring sums.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kFourSums = true;
#else
constexpr bool kFourSums = false;
#endif
template<typename Kernel_traits>
using SumsOf = std::conditional_t<kFourSums, typename Kernel_traits::GmemTiledCopydQaccum,
    typename Kernel_traits::GmemTiledCopydQaccumAtomicAdd>;

// What a thread block does about turns while it goes from one block of queries to the next. One thread passes
// on the turn of the step before, which all threads have met at a barrier after; another waits for the turn
// of this one, which ends after a barrier to come. The fence that the first needs takes long, and so the
// other warps have their work meanwhile.
template<typename Kernel_traits, bool Ordered, bool Is_local>
struct Steps {
    static_assert(Kernel_traits::kBlockM >= kRows && Kernel_traits::kNThreads > 32);

    const Flash_bwd_params &params;
    const int bidb, bidh, n_block;

    // Behind the barrier at which the step begins.
    __forceinline__ __device__ void pass_on_last(const int m_block, const bool is_first) const {
        if (by_turns<Kernel_traits, Ordered>(params) && threadIdx.x == 0 && !is_first) {
            pass_on(m_block + 1);
        }
    }

    // Behind it, and before the barrier in front of add().
    __forceinline__ __device__ void await(const int m_block) const {
        if (by_turns<Kernel_traits, Ordered>(params) && threadIdx.x == 32) {
            const Turn<Is_local> own = turn(m_block);
            fork_turn::await(
                own.turn, own.position, params.fork_bwd.dq_ticket + 1, params.fork_bwd.wait_limit);
        }
    }

    template<typename Sums, typename Summands>
    static __forceinline__ __device__ void add(Sums &sums, const Summands &summands) {
        #pragma unroll
        for (int i = 0; i < cute::size(summands); i += kFourSums ? 4 : 1) {
            float *const sum = &sums(i);
            if constexpr (kFourSums) {
                asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sum),
                    "f"(summands(i)), "f"(summands(i + 1)), "f"(summands(i + 2)), "f"(summands(i + 3))
                    : "memory");
            } else if constexpr (Ordered) {
                // atomicAdd beside a fence becomes an instruction that returns the sum before, which takes
                // longer.
                asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(summands(i))
                    : "memory");
            } else {
                atomicAdd(sum, summands(i));
            }
        }
    }

    // Behind a barrier after the last step.
    __forceinline__ __device__ void finish(const int m_block) const {
        if (by_turns<Kernel_traits, Ordered>(params) && threadIdx.x == 0) { pass_on(m_block); }
    }

private:
    __forceinline__ __device__ Turn<Is_local> turn(const int m_block) const {
        return Turn<Is_local>(
            params, bidb, bidh, n_block, m_block, Kernel_traits::kBlockM, Kernel_traits::kBlockN);
    }

    __forceinline__ __device__ void pass_on(const int m_block) const {
        const Turn<Is_local> own = turn(m_block);
        fork_turn::pass_on(own.turn, own.position);
    }
};

#endif

}  // namespace fork_order
}  // namespace FLASH_NAMESPACE

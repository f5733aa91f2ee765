// Decoding: what the warps of a thread block do that has up to 16 rows (fork_narrow.h).

#pragma once

#include <algorithm>

#include <cute/tensor.hpp>
#include <cutlass/array.h>
#include <cutlass/fast_math.h>
#include <cutlass/numeric_conversion.h>

#include "namespace_config.h"
#include "flash.h"
#include "fork_append.h"
#include "fork_fold.h"
#include "fork_keys.h"
#include "fork_sink_join.h"
#include "fork_slices.h"
#include "fork_tile_copies.h"
#include "utils.h"

namespace FLASH_NAMESPACE {
namespace fork_narrow {

using namespace cute;

constexpr int kRows = 16;
constexpr int kWarps = 4, kRoleThreads = 32 * kWarps;  // of each of two roles
constexpr int kCopyThreads = 128, kThreads = kCopyThreads + 2 * kRoleThreads;

// What a thread block has in shared memory. Queries lie where exponentials do later.
template<typename Kernel_traits>
struct Shared {
    using Element = typename Kernel_traits::Element;
    static constexpr int kBlockN = Kernel_traits::kBlockN, kHeadDim = Kernel_traits::kHeadDim;
    static constexpr int kStep = fork_keys::step(kHeadDim), kSteps = kBlockN / kStep;
    static constexpr int kPad = 8;  // so that rows begin at other banks

    // Exponentials lie as they are summed: four threads have a row, each two of every eight keys.
    struct Exps {
        float of_thread[4][kBlockN / 4 + 4];
    };
    union {
        alignas(16) Element q[kRows][kHeadDim + kPad];
        alignas(16) Exps exps[kRows];
    };
    alignas(16) Element probabilities[kRows][kBlockN + kPad];
    alignas(16) float maxima[kRows][kWarps];  // of a tile
    float scale[kSteps][kRows];               // of what was summed up before each step
    float max[kRows], sums[kRows];            // of a chunk so far

    // Behind it lie slots for tiles of keys, and as many for tiles of values. One of each is read while the
    // others are on their way.
    static constexpr int kFewest = 2, kMost = kHeadDim <= 64 ? 4 : 3;
    static constexpr int own_size() { return (sizeof(Shared) + 127) / 128 * 128; }
    static constexpr int size(const int slots) {
        return own_size() + 2 * slots * kBlockN * kHeadDim * int(sizeof(Element));
    }
    __forceinline__ __device__ Element *tile(const int slot) {
        return reinterpret_cast<Element *>(reinterpret_cast<char *>(this) + own_size())
            + slot * kBlockN * kHeadDim;
    }
};

// Four 8 x 8 matrices whose rows begin where each lane says.
template<typename Element>
__forceinline__ __device__ void load_matrices(const Element *row, uint32_t (&to)[4]) {
    SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const uint128_t *>(row), to[0], to[1], to[2], to[3]);
}
template<typename Element>
__forceinline__ __device__ void load_transposed(const Element *row, uint32_t (&to)[4]) {
    SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const uint128_t *>(row), to[0], to[1], to[2], to[3]);
}

template<typename Element>
__forceinline__ __device__ void multiply(
    float (&c)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
    using Op = std::conditional_t<std::is_same_v<Element, cutlass::bfloat16_t>,
        SM80_16x8x16_F32BF16BF16F32_TN, SM80_16x8x16_F32F16F16F32_TN>;
    Op::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
}

__forceinline__ __device__ float largest_of_four(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
}
__forceinline__ __device__ float sum_of_four(float x) {
    x = __fadd_rn(x, __shfl_xor_sync(0xffffffff, x, 2));
    return __fadd_rn(x, __shfl_xor_sync(0xffffffff, x, 1));
}

// What a thread block does: some rows of a sequence, on tiles from the last to the first.
struct Work {
    int bidb, bidh, n_split_idx, rows;
    int last, first;  // tiles
    int chunk;        // tiles in a chunk
    bool walks_all;   // all chunks are this thread block's
    bool is_off;      // the mode: a partial result is divided by its sum, and has an lse
    bool by_row;      // queries are turned each by its own position

    // The tile that the chunk of the last one ends with, if it is folded here
    __forceinline__ __device__ int next_fold() const { return walks_all ? last / chunk * chunk : -1; }
};

template<typename Kernel_traits, bool Is_even_K, typename Info, typename Group>
__forceinline__ __device__ void load_queries(const Flash_fwd_params &params, const Info &binfo,
    const Group &group, const Work &work, Shared<Kernel_traits> &shared) {
    using Element = typename Kernel_traits::Element;
    constexpr int kRuns = Kernel_traits::kHeadDim / 8;
    const bool turn = params.knew_ptr != nullptr && params.rotary_dim > 0;
    const auto *sequence = static_cast<const Element *>(params.q_ptr)
        + binfo.q_offset(params.q_batch_stride, params.q_row_stride, work.bidb);
    for (int i = threadIdx.x - kCopyThreads; i < kRows * kRuns; i += 2 * kRoleThreads) {
        const int row = i / kRuns, col = i % kRuns * 8;
        fork_append::Run<Element, 8> run;
        run.clear();
        if (row < work.rows && (Is_even_K || col < params.d)) {
            const Element *from = sequence + int64_t(group.query(row)) * params.q_row_stride
                + int64_t(group.head(work.bidh, row)) * params.q_head_stride;
            if (!turn) {
                run = fork_append::load<8>(from + col);
            } else {
                const int64_t position =
                    int64_t(binfo.seqlen_k_cache) + binfo.leftpad_k + (work.by_row ? group.query(row) : 0);
                if (position < 0 || position >= params.fork.rotary_rows) {
                    run.fill(Element(NAN));  // past the table of rotations
                } else {
                    run = fork_append::load_turned(params, from, col, position);
                }
            }
        }
        fork_append::store<8>(&shared.q[row][col], run);
    }
}

// Waits for what was sent before the last few groups, of which there is an even number.
__forceinline__ __device__ void wait_but_for(const int groups) {
    switch (groups) {
    case 0:
        return cp_async_wait<0>();
    case 2:
        return cp_async_wait<2>();
    case 4:
        return cp_async_wait<4>();
    default:
        return cp_async_wait<6>();
    }
}

// What the three roles do between barriers, to which all come. Tiles are numbered as they are walked, 0 to
// T - 1, and lie in slot t % S of S slots for keys and as many for values. Barrier A is passed once, then
// B(t) and C(t) for t = -1 to T - 1, but for the last C.
//
//  between           copy_tiles                       multiply_keys                multiply_values
//  start and A       sends for keys 0 to S - 1 and    fetches queries; 1 for the   fetches queries; clears
//  rows
//                    values 0 to S - 2; waits for     scale of rows                that nobody writes; -inf
//                    for keys 0                                                        maxima
//  A and B(-1)       -                                keys 0, their maxima         -
//  B(t-1) and C(t-1) waits for values t, keys t + 1   exponentials of tile t       folds, if a chunk ended
//  with
//                                                                                  t - 1 and all are walked
//                                                                                  here
//  C(t-1) and B(t)   sends for values t + S - 1 and   keys t + 1, their maxima     values t, sums of their
//                    keys t + S, into the slots of                                 exponentials
//                    values t - 1 and keys t
//
// Queries are read up to B(-1), and exponentials lie in their place from then on. A tile's values and the
// next one's keys are two groups of cp.async, which are sent for one after the other.

// Sends for all tiles.
template<typename Kernel_traits, bool Is_even_K, typename Info>
__forceinline__ __device__ void copy_tiles(const Flash_fwd_params &params, const Info &binfo,
    const Work &work, const int slots, Shared<Kernel_traits> &shared) {
    using Element = typename Kernel_traits::Element;
    const int bidb_cache = params.cache_batch_idx == nullptr ? work.bidb : params.cache_batch_idx[work.bidb];
    const int *table = params.block_table == nullptr
        ? nullptr
        : params.block_table + work.bidb * params.block_table_batch_stride;
    const auto copies_of = [&](void *all, const int64_t batch_stride, const int64_t row_stride,
                               const int64_t head_stride) {
        const int64_t of_sequence =
            table == nullptr ? binfo.k_offset(batch_stride, row_stride, bidb_cache) : 0;
        return TileCopies<Kernel_traits, Is_even_K, kCopyThreads>(
            static_cast<const Element *>(all) + of_sequence + work.bidh / params.h_h_k_ratio * head_stride,
            batch_stride, row_stride, table, params.page_block_size, params.d,
            std::min(binfo.readable_keys(params), (work.last + 1) * Kernel_traits::kBlockN), work.last);
    };
    auto keys = copies_of(params.k_ptr, params.k_batch_stride, params.k_row_stride, params.k_head_stride),
         values = copies_of(params.v_ptr, params.v_batch_stride, params.v_row_stride, params.v_head_stride);
    // In pairs: a tile's values, and the next one's keys, which are multiplied at the same time. They are
    // sent for while those of n_products are multiplied; while that is past the last tile, the slots are
    // filled.
    int slot = slots - 1;
    for (int n_block = work.last + 1, n_products = work.last + slots;; --n_block, --n_products) {
        if (n_block <= work.last && n_block >= work.first) {
            values.send(shared.tile(slots + slot), n_block);
        }
        cute::cp_async_fence();
        slot = slot == slots - 1 ? 0 : slot + 1;
        if (n_block > work.first) { keys.send(shared.tile(slot), n_block - 1); }
        cute::cp_async_fence();
        if (n_products > work.last + 1) { continue; }
        if (n_products == work.last + 1) {
            wait_but_for(2 * slots - 2);
            __syncthreads();
        }
        __syncthreads();
        if (n_products == work.first) { return; }
        wait_but_for(2 * slots - 4);
        __syncthreads();
    }
}

// Queries times keys, and their exponentials. Each warp has some of a tile's keys.
template<typename Kernel_traits, typename Info, typename Group>
__forceinline__ __device__ void multiply_keys(const Flash_fwd_params &params, const Info &binfo,
    const Group &group, const Work &work, const int slots, Shared<Kernel_traits> &shared) {
    using Element = typename Kernel_traits::Element;
    constexpr int kBlockN = Kernel_traits::kBlockN, kHeadDim = Kernel_traits::kHeadDim;
    constexpr int kSteps = Shared<Kernel_traits>::kSteps, kStep = Shared<Kernel_traits>::kStep;
    constexpr int kKeys = kBlockN / kWarps;  // of a warp
    static_assert(kKeys % 8 == 0 && kStep % kKeys == 0);
    const int warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32, quad = lane % 4;
    // A thread has two rows.
    const int first_row = lane / 4;
    const bool has_lower = work.rows > 8;
    fork_fold::Keys visible[2];
    #pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
        visible[mi] = fork_fold::visible_keys(params, binfo, group.query(first_row + 8 * mi));
    }
    const int visible_to_all = std::min(visible[0].end, visible[1].end),
              visible_from_all = std::max(visible[0].begin, visible[1].begin);
    if (lane < kRows && warp < kSteps) { shared.scale[warp][lane] = 1.f; }
    // Where a lane's row of matrices begins in a tile, whose rows lie in panels of so many columns.
    // Further panels, and further rows of a panel by 8, lie at fixed distances.
    constexpr int kPanel = Kernel_traits::kBlockKSmem;
    int of_keys[kPanel / 32];
    #pragma unroll
    for (int k = 0; k < kPanel / 32; ++k) {
        of_keys[k] = typename Kernel_traits::SmemLayoutKV{}(warp * kKeys + lane % 8, k * 32 + lane / 8 * 8);
    }
    __syncthreads();
    uint32_t q[kHeadDim / 16][4];
    #pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
        load_matrices(&shared.q[lane % 16][k * 16 + lane / 16 * 8], q[k]);
    }
    float row_max[2] = {-INFINITY, -INFINITY};
    int slot = 0, fold_at = work.next_fold();
    for (int n_block = work.last;; --n_block) {
        const Element *const keys = shared.tile(slot);
        slot = slot == slots - 1 ? 0 : slot + 1;
        float scores[kKeys / 8][4] = {};
        #pragma unroll
        for (int k = 0; k < kHeadDim / 32; ++k) {
            uint32_t b[kKeys / 8][4];
            #pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
                load_matrices(
                    keys + of_keys[k % (kPanel / 32)] + k * 32 / kPanel * kBlockN * kPanel + n * 8 * kPanel,
                    b[n]);
            }
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
                #pragma unroll
                for (int n = 0; n < kKeys / 8; ++n) {
                    multiply<Element>(scores[n], q[2 * k + i], b[n][2 * i], b[n][2 * i + 1]);
                }
            }
        }
        if (params.softcap > 0.f) {
            #pragma unroll
            for (int i = 0; i < kKeys / 2; ++i) {
                float &score = scores[i / 4][i % 4];
                score = cutlass::fast_tanh(score * params.softcap);
            }
        }
        const int begin = n_block * kBlockN;
        if (begin < visible_from_all || begin + kBlockN > visible_to_all) {
            #pragma unroll
            for (int i = 0; i < kKeys / 2; ++i) {
                const int key = begin + warp * kKeys + i / 4 * 8 + quad * 2 + i % 2;
                const fork_fold::Keys &seen = visible[i / 2 % 2];
                if (key < seen.begin || key >= seen.end) { scores[i / 4][i % 4] = -INFINITY; }
            }
        }
        #pragma unroll
        for (int mi = 0; mi < 2; ++mi) {
            if (mi == 1 && !has_lower) { break; }
            float largest = -INFINITY;
            #pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
                largest = fmaxf(largest, fmaxf(scores[n][2 * mi], scores[n][2 * mi + 1]));
            }
            largest = largest_of_four(largest);
            if (quad == 0) { shared.maxima[first_row + 8 * mi][warp] = largest; }
        }
        __syncthreads();
        #pragma unroll
        for (int mi = 0; mi < 2; ++mi) {
            if (mi == 1 && !has_lower) { break; }
            const int row = first_row + 8 * mi;
            const float4 four = *reinterpret_cast<const float4 *>(shared.maxima[row]);
            const float maxima[kWarps] = {four.x, four.y, four.z, four.w};
            float scaled = 0.f;
            #pragma unroll
            for (int step = kSteps - 1; step >= 0; --step) {
                const float before = row_max[mi];
                #pragma unroll
                for (int w = 0; w < kWarps / kSteps; ++w) {
                    row_max[mi] = fmaxf(row_max[mi], maxima[step * (kWarps / kSteps) + w]);
                }
                const float current = row_max[mi] == -INFINITY ? 0.f : row_max[mi];
                if (warp == step && quad == 0) {
                    shared.scale[step][row] = exp2f((before - current) * params.scale_softmax_log2);
                }
                if (kSteps == 1 || warp * kKeys / kStep == step) {
                    scaled = row_max[mi] == -INFINITY ? 0.f : row_max[mi] * params.scale_softmax_log2;
                }
            }
            if (warp == 0 && quad == 0) { shared.max[row] = row_max[mi]; }
            #pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
                cutlass::Array<float, 2> exps;
                #pragma unroll
                for (int i = 0; i < 2; ++i) {
                    exps[i] = exp2f(scores[n][2 * mi + i] * params.scale_softmax_log2 - scaled);
                }
                *reinterpret_cast<float2 *>(&shared.exps[row].of_thread[quad][(warp * kKeys / 8 + n) * 2]) =
                    make_float2(exps[0], exps[1]);
                *reinterpret_cast<cutlass::Array<Element, 2> *>(
                    &shared.probabilities[row][warp * kKeys + n * 8 + quad * 2]) =
                    cutlass::NumericArrayConverter<Element, float, 2>::convert(exps);
            }
            if (n_block == fold_at) { row_max[mi] = -INFINITY; }
        }
        if (n_block == fold_at) { fold_at -= work.chunk; }
        __syncthreads();
        if (n_block == work.first) {
            __syncthreads();
            return;
        }
    }
}

// Probabilities times values, the sums of exponentials, and the result. Each warp has some of the columns.
template<typename Kernel_traits, bool Is_even_K, typename Info>
__forceinline__ __device__ void multiply_values(const Flash_fwd_params &params, const Info &binfo,
    const Work &work, const int slots, Shared<Kernel_traits> &shared) {
    using Element = typename Kernel_traits::Element;
    constexpr int kBlockN = Kernel_traits::kBlockN;
    constexpr int kSteps = Shared<Kernel_traits>::kSteps, kStep = Shared<Kernel_traits>::kStep;
    constexpr int kColumns = Kernel_traits::kHeadDim / kWarps;  // of a warp
    static_assert(kColumns % 8 == 0);
    const int warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32, quad = lane % 4;
    for (int i = threadIdx.x - kCopyThreads - kRoleThreads; i < (kRows - work.rows) * kBlockN;
        i += kRoleThreads) {
        shared.probabilities[work.rows + i / kBlockN][i % kBlockN] = Element(0.f);  // some nobody writes
    }
    if (threadIdx.x % kRoleThreads < kRows) { shared.max[threadIdx.x % kRoleThreads] = -INFINITY; }
    const int first_row = lane / 4;
    constexpr int kPanel = Kernel_traits::kBlockKSmem;
    int of_values[kColumns / 8];
    #pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
        of_values[n] = typename Kernel_traits::SmemLayoutKV{}(lane, warp * kColumns + n * 8);
    }
    // The row whose exponentials this lane sums, with three others
    const int sum_row = warp * 4 + lane / 4 % 4, read_row = sum_row < work.rows ? sum_row : 0;
    float sum = 0.f;
    float acc[kColumns / 8][4] = {};
    float folded_max[2] = {-INFINITY, -INFINITY}, folded_sum[2] = {};
    float folded[kColumns / 8][4] = {};
    int slot = 0, fold_at = work.next_fold();
    __syncthreads();
    __syncthreads();  // the first keys are multiplied
    __syncthreads();
    for (int n_block = work.last;; --n_block) {
        const Element *const values = shared.tile(slots + slot);
        slot = slot == slots - 1 ? 0 : slot + 1;
        #pragma unroll
        for (int step = kSteps - 1; step >= 0; --step) {
            const float scale[2] = {shared.scale[step][first_row], shared.scale[step][first_row + 8]};
            const float scale_of_sum = shared.scale[step][sum_row];
            #pragma unroll
            for (int n = 0; n < kColumns / 8; ++n) {
                #pragma unroll
                for (int i = 0; i < 4; ++i) { acc[n][i] *= scale[i / 2]; }
            }
            #pragma unroll
            for (int k = 0; k < kStep / 32; ++k) {
                uint32_t a[2][4], b[kColumns / 8][4];
                #pragma unroll
                for (int i = 0; i < 2; ++i) {
                    load_matrices(
                        &shared.probabilities[lane % 16][step * kStep + k * 32 + i * 16 + lane / 16 * 8],
                        a[i]);
                }
                #pragma unroll
                for (int n = 0; n < kColumns / 8; ++n) {
                    load_transposed(values + of_values[n] + (step * kStep + k * 32) * kPanel, b[n]);
                }
                #pragma unroll
                for (int i = 0; i < 2; ++i) {
                    #pragma unroll
                    for (int n = 0; n < kColumns / 8; ++n) {
                        multiply<Element>(acc[n], a[i], b[n][2 * i], b[n][2 * i + 1]);
                    }
                }
            }
            // The first addition is fused with the scaling, as nvcc does in the split kernels.
            #pragma unroll
            for (int n = 0; n < kStep / 16; ++n) {
                const float4 four = *reinterpret_cast<const float4 *>(
                    &shared.exps[read_row].of_thread[quad][step * (kStep / 4) + n * 4]);
                sum = n == 0 ? __fmaf_rn(sum, scale_of_sum, four.x) : __fadd_rn(sum, four.x);
                sum = __fadd_rn(__fadd_rn(__fadd_rn(sum, four.y), four.z), four.w);
            }
        }
        const bool chunk_ends = n_block == fold_at || n_block == work.first;
        float max_of_chunk[2] = {};
        if (chunk_ends) {
            sum = sum_of_four(sum);
            if (lane < 16 && quad == 0) { shared.sums[sum_row] = sum; }
            max_of_chunk[0] = shared.max[first_row];
            max_of_chunk[1] = shared.max[first_row + 8];
        }
        __syncthreads();
        if (work.walks_all && chunk_ends) {
            fold_at -= work.chunk;
            #pragma unroll
            for (int mi = 0; mi < 2; ++mi) {
                const int row = first_row + 8 * mi;
                const fork_fold::Weights weights = fork_fold::fold_row(folded_max[mi], folded_sum[mi],
                    max_of_chunk[mi], shared.sums[row], params.scale_softmax_log2);
                #pragma unroll
                for (int n = 0; n < kColumns / 8; ++n) {
                    #pragma unroll
                    for (int i = 2 * mi; i < 2 * mi + 2; ++i) {
                        folded[n][i] = fork_fold::fold_element(weights, folded[n][i], acc[n][i]);
                        acc[n][i] = 0.f;
                    }
                }
            }
            sum = 0.f;
        }
        if (n_block == work.first) { break; }
        __syncthreads();
    }

    if (work.walks_all) {
        #pragma unroll
        for (int mi = 0; mi < 2; ++mi) {
            const int row = first_row + 8 * mi;
            if (row >= work.rows) { continue; }
            const float lse = fork_fold::log_sum_exp(folded_max[mi], folded_sum[mi], params.scale_softmax);
            const float inverse = fork_fold::inverse_sum(folded_sum[mi]);
            const float share = fork_sink::share(params, work.bidh, row, lse);
            auto *const out = static_cast<Element *>(params.o_ptr)
                + binfo.q_offset(params.o_batch_stride, params.o_row_stride, work.bidb)
                + int64_t(row) * params.o_row_stride + work.bidh * params.o_head_stride;
            #pragma unroll
            for (int n = 0; n < kColumns / 8; ++n) {
                const int col = warp * kColumns + n * 8 + quad * 2;
                if (Is_even_K || col < params.d) {
                    cutlass::Array<float, 2> two;
                    #pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        two[i] = __fmul_rn(__fmul_rn(folded[n][2 * mi + i], inverse), share);
                    }
                    *reinterpret_cast<cutlass::Array<Element, 2> *>(out + col) =
                        cutlass::NumericArrayConverter<Element, float, 2>::convert(two);
                }
            }
            if (warp == 0 && quad == 0) {
                fork_fold::write_lse(params, binfo, work.bidb, work.bidh, row, lse);
            }
        }
        return;
    }

    // Leaves the partial result.
    const int64_t flat = fork_slices::row_at(params.fork.slice, work.n_split_idx, work.bidb, work.bidh, 0);
    if (lane < 16 && quad == 0 && sum_row < work.rows) {
        float *const state = static_cast<float *>(params.softmax_lseaccum_ptr) + flat + sum_row;
        if (work.is_off) {
            const float lse = fork_fold::log_sum_exp(shared.max[sum_row], sum, params.scale_softmax);
            const float own = lse == INFINITY ? -INFINITY : lse;
            state[0] = fork_fold::or_short(params, binfo, sum_row, own);
        } else {
            state[0] = shared.max[sum_row];
            state[fork_in_turns::kept(params) * fork_slices::num_rows(params.fork.slice)] = sum;
        }
    }
    #pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
        const int row = first_row + 8 * mi;
        if (row >= work.rows) { continue; }
        const float share = work.is_off ? fork_fold::inverse_sum(shared.sums[row]) : 1.f;
        float *const out = static_cast<float *>(params.oaccum_ptr) + (flat + row) * params.d_rounded;
        #pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
            const int col = warp * kColumns + n * 8 + quad * 2;
            if (Is_even_K || col < params.d) {
                *reinterpret_cast<float2 *>(out + col) =
                    make_float2(__fmul_rn(acc[n][2 * mi], share), __fmul_rn(acc[n][2 * mi + 1], share));
            }
        }
    }
}

}  // namespace fork_narrow
}  // namespace FLASH_NAMESPACE

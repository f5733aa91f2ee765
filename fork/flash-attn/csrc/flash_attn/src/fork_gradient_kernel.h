// The gradient of attn_bias, by a kernel of its own behind that of dq, dk and dv.
//
// A thread block has a tile of the gradient, and goes through all scores that share it: sequence by sequence,
// head by head and, where all queries share it, block by block of them. It finds the scores and the gradient
// of their probabilities once more, two products of five, and adds p * (dp - d) up in registers: in one
// order, without memory in between and without waiting for anybody. Then it writes its tile, once, in the
// type of the bias.
//
// Where few tiles are shared by many, the scores of a tile are in parts, each of which has a thread block;
// the host adds them up.

#pragma once

#include <algorithm>

#include "namespace_config.h"
#include "block_info.h"
#include "flash.h"
#include "flash_bwd_kernel.h"
#include "fork_product.h"
#include "fork_runtime.h"
#include "fork_tile.h"
#include "kernel_traits.h"
#include "softmax.h"
#include "utils.h"

namespace FLASH_NAMESPACE {
namespace fork_bias {

// Whether there are two of each of the four tiles, of q, k, v and dO, so that the next come while these are
// worked on, and room for the bias. Where there is one, the next are fetched as soon as a product has read
// it.
template<typename Traits>
constexpr bool kInShared = !Traits::No_double_buffer;
// Bytes
template<typename Traits>
constexpr int kGradientTiles =
    2 * (cute::size(typename Traits::SmemLayoutQdO{}) + cute::size(typename Traits::SmemLayoutKV{}))
    * sizeof(typename Traits::Element);
template<typename Traits>
constexpr int gradient_smem(const bool bias_is_float) {
    return kInShared<Traits> ? 2 * (kGradientTiles<Traits> + 2 * Traits::kBlockM * int(sizeof(float)))
            + Traits::kBlockM * Traits::kBlockN * (bias_is_float ? 4 : 2)
                             : kGradientTiles<Traits>;
}

// By the parameters of the traits of the kernel of dq, dk and dv, whose Element is half_t in every host pass.
template<typename Kernel_traits>
struct GradientTraitsOf;
template<int kHeadDim, int kBlockM, int kBlockN, int kNWarps, int kWarpsM, int kWarpsNdKV, int kWarpsMdQ,
    bool Is_V_in_regs, bool No_double_buffer, typename T, typename Base>
struct GradientTraitsOf<Flash_bwd_kernel_traits<kHeadDim, kBlockM, kBlockN, kNWarps, kWarpsM, kWarpsNdKV,
    kWarpsMdQ, Is_V_in_regs, No_double_buffer, T, Base>> {
    static constexpr int kKeys = kHeadDim <= 128 ? 128 : kBlockN < 64 ? kBlockN : 64;
    template<bool kOnce>
    using With = Flash_bwd_kernel_traits<kHeadDim, 64, kKeys, 8, (kKeys < 64 ? 4 : 2), 4, 4, false, kOnce, T>;
    // What a thread block may have on each GPU that runs the kernel of dq, dk and dv; every one has 99 KiB.
    static constexpr int kRoom = std::max(99 * 1024,
        Flash_bwd_kernel_traits<kHeadDim, kBlockM, kBlockN, kNWarps, kWarpsM, kWarpsNdKV, kWarpsMdQ,
            Is_V_in_regs, No_double_buffer, T, Base>::kSmemSize1colblock);
    // Up to head dim 64 two of each tile leave two thread blocks to a multiprocessor, if their threads have
    // half of the registers each.
    using type = With<(kHeadDim > 64 || gradient_smem<With<false>>(/*bias_is_float=*/true) > kRoom)>;
    static_assert(gradient_smem<type>(/*bias_is_float=*/true) <= kRoom);
};
template<typename Kernel_traits>
using GradientTraits = typename GradientTraitsOf<Kernel_traits>::type;

// An element of the bias where the bit is set, else 0. Finite ones count as in the scores of the forward
// pass.
template<typename Element>
__forceinline__ __device__ float load_bias(
    const uint32_t bits, const uint32_t bit, const void *at, const bool is_float) {
    float value;
    uint16_t half;
    asm("{\n"
        ".reg .pred visible, full, half;\n"
        ".reg .b32 own;\n"
        "and.b32 own, %2, %3;\n"
        "setp.ne.s32 visible, own, 0;\n"
        "setp.ne.and.s32 full, %5, 0, visible;\n"
        "setp.eq.and.s32 half, %5, 0, visible;\n"
        "mov.f32 %0, 0f00000000;\n"
        "mov.b16 %1, 0;\n"
        "@full ld.global.f32 %0, [%4];\n"
        "@half ld.global.b16 %1, [%4];\n"
        "}\n"
        : "=&f"(value), "=&h"(half)
        : "r"(bits), "r"(bit), "l"(at), "r"(int(is_float)));
    if (!is_float) { value = float(reinterpret_cast<const Element &>(half)); }
    // The largest bfloat16 below it
    const float most = !is_float && std::is_same_v<Element, cutlass::bfloat16_t> ? 65280.f : kMostBias;
    return value == -INFINITY || value != value ? value : fminf(fmaxf(value, -most), most);
}

// A use of the thread block's tile of the bias: a block of the scores of one head of a sequence.
template<typename Traits, typename Params>
struct BiasUse {
    const Params &params;
    const int n_block, first_head, end_head, end_batch;
    const bool all_rows;
    int bidb, bidh, key_head, m_block;
    bool found = false;

    // Before the first use. row_block: the only block of rows, or -1 for all.
    __forceinline__ __device__ BiasUse(const Params &params, const int n_block, const int first_head,
        const int end_head, const int first_batch, const int end_batch, const int row_block)
        : params(params),
          n_block(n_block),
          first_head(first_head),
          end_head(end_head),
          end_batch(end_batch),
          all_rows(row_block < 0),
          bidb(first_batch),
          bidh(first_head),
          key_head(first_head / params.h_h_k_ratio),
          m_block(row_block) {}

    // Goes on to the next use in which a row sees a key of the tile.
    __forceinline__ __device__ void next(const bool is_first) {
        if (!is_first && !all_rows) { next_head(); }
        for (found = false; bidb < end_batch; next_head()) {
            const BlockInfo</*Varlen=*/true> binfo(params, bidb);
            const int first_key = n_block * Traits::kBlockN;
            for (m_block += all_rows;
                first_key < num_keys(params, binfo) && m_block * Traits::kBlockM < binfo.actual_seqlen_q;
                ++m_block) {
                const int row = m_block * Traits::kBlockM,
                          last_row = min(row + Traits::kBlockM, binfo.actual_seqlen_q) - 1;
                found = fork_fold::visible_keys(params, binfo, last_row).end > first_key
                    && fork_fold::visible_keys(params, binfo, row).begin < first_key + Traits::kBlockN;
                if (found) { return; }
                if (!all_rows) { break; }
            }
            if (all_rows) { m_block = -1; }
        }
    }

private:
    __forceinline__ __device__ void next_head() {
        const int before = bidh;
        if (++bidh == end_head) {
            bidh = first_head;
            ++bidb;
        }
        if (bidh != before) { key_head = bidh / params.h_h_k_ratio; }
    }
};

// Copies a tile of so many rows and columns, zeros behind them. A thread's pieces lie whole tiles of the
// swizzle apart.
template<typename Traits, typename Tile>
__forceinline__ __device__ void fetch_tile(Tile &tile, const typename Traits::Element *first,
    const int64_t row_stride, const int rows, const int columns) {
    constexpr int kElements = kPiece / sizeof(typename Traits::Element),
                  kColumns = Traits::kGmemThreadsPerRow * kElements,
                  kAtOnce = Traits::kNThreads / Traits::kGmemThreadsPerRow;
    constexpr int kRows = cute::size<0>(typename Tile::layout_type{}),
                  kHeadDim = cute::size<1>(typename Tile::layout_type{});
    static_assert(
        kAtOnce % 8 == 0 && kHeadDim % kColumns == 0 && (kRows % kAtOnce == 0 || kAtOnce % kRows == 0));
    const int row = threadIdx.x / Traits::kGmemThreadsPerRow,
              column = threadIdx.x % Traits::kGmemThreadsPerRow * kElements;
    if (kRows < kAtOnce && row >= kRows) { return; }
    const uint32_t to = cute::cast_smem_ptr_to_uint(&tile(row, column));
    const typename Traits::Element *from = first + row * row_stride + column;
    #pragma unroll
    for (int r = 0; r < kRows; r += kAtOnce) {
        #pragma unroll
        for (int c = 0; c < kHeadDim; c += kColumns) {
            const uint32_t at = to + uint32_t(typename Tile::layout_type{}(r, c) * sizeof(*from));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from + c),
                "r"(row + r < rows && column + c < columns ? kPiece : 0)
                : "memory");
        }
        from += kAtOnce * row_stride;
    }
}

template<int kRows, int kKeys, typename Exist>
__forceinline__ __device__ bool all_exist(const Exist &exist) {
    bool all = true;
    #pragma unroll
    for (int r = 0; r < kRows; ++r) {
        all = all && (exist(r) & Visible<kRows, kKeys>::kAll) == Visible<kRows, kKeys>::kAll;
    }
    return all;
}

// A thread's elements of the bias, of so many rows and keys; of those that are not there zeros.
template<typename Traits, int kRows, int kKeys>
struct OwnBias {
    using Element = typename Traits::Element;
    const Flash_bwd_params &params;
    float inverse_scale;
    float values[kInShared<Traits> ? 1 : kRows][kInShared<Traits> ? 1 : kKeys];

    // The rows that share it begin there.
    template<typename Exist>
    __forceinline__ __device__ OwnBias(const Flash_bwd_params &params, const char *first,
        const ThreadTile thread_tile, const int first_key, const Exist &exist)
        : params(params) {
        const bool is_float = params.fork.scores.bias_is_float;
        const int64_t bytes = is_float ? 4 : 2, row_stride = params.fork.scores.bias.row_stride * bytes,
                      key_stride = params.fork.scores.bias.key_stride * bytes;
        first += ThreadTile::key_of(first_key, 0) * key_stride;
        const auto term = [&](const int i) {
            return float(reinterpret_cast<const Element &>(params.fork.scores.inverse_terms[i]));
        };
        inverse_scale = is_float ? params.fork.scores.inverse_scale : term(0) + term(1);
        const bool in_words = !is_float && key_stride == 2
            && ((reinterpret_cast<uintptr_t>(first) | uintptr_t(row_stride)) % 4) == 0;
        if constexpr (!kInShared<Traits>) {
            #pragma unroll
            for (int r = 0; r < kRows; ++r) {
                #pragma unroll
                for (int c = 0; c < kKeys; ++c) {
                    values[r][c] = load_bias<Element>(exist(r), 1u << c,
                        first + thread_tile.row_of(r) * row_stride + (c / 2 * 8 + c % 2) * key_stride,
                        is_float);
                }
            }
        } else if (is_float) {
            #pragma unroll
            for (int r = 0; r < kRows; ++r) {
                #pragma unroll
                for (int c = 0; c < kKeys; c += 4) {
                    const char *at = first + thread_tile.row_of(r) * row_stride + c * 4 * key_stride;
                    const auto load = [&](const int i) {
                        return load_bias<Element>(
                            exist(r), 1u << (c + i), at + (i / 2 * 8 + i % 2) * key_stride, true);
                    };
                    float4 *const to = reinterpret_cast<float4 *>(own((r * kKeys + c) / 4));
                    *to = make_float4(load(0), load(1), load(2), load(3));
                }
            }
        } else if (in_words && all_exist<kRows, kKeys>(exist)) {
            // Of each eight keys a word of a row, and one of the row eight rows on, as Product has them
            uint32_t words[kRows / 2][kKeys];
            #pragma unroll
            for (int r = 0; r < kRows; ++r) {
                #pragma unroll
                for (int c = 0; c < kKeys; c += 2) {
                    words[r / 2][c + r % 2] = *reinterpret_cast<const uint32_t *>(
                        first + thread_tile.row_of(r) * row_stride + c * 8);
                }
            }
            #pragma unroll
            for (int i = 0; i < kRows * kKeys / 2; i += 4) {
                *own(i / 4) = make_uint4(words[i / kKeys][i % kKeys], words[i / kKeys][i % kKeys + 1],
                    words[i / kKeys][i % kKeys + 2], words[i / kKeys][i % kKeys + 3]);
            }
        } else {
            #pragma unroll 1
            for (int i = 0; i < kRows * kKeys / 2; i += 4) {
                uint32_t words[4];
                #pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int r = i / kKeys * 2 + j % 2, c = i % kKeys + j / 2 * 2;
                    const char *at = first + thread_tile.row_of(r) * row_stride + c * 4 * key_stride;
                    words[j] = load_element(exist(r), 1u << c, at)
                        | load_element(exist(r), 2u << c, at + key_stride) << 16;
                }
                *own(i / 4) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }

    template<typename Scores>
    __forceinline__ __device__ void add(Scores &scores) const {
        if constexpr (!kInShared<Traits>) {
            #pragma unroll
            for (int r = 0; r < kRows; ++r) {
                #pragma unroll
                for (int c = 0; c < kKeys; ++c) {
                    scores(r, c) = __fmaf_rn(values[r][c], inverse_scale, scores(r, c));
                }
            }
        } else if (params.fork.scores.bias_is_float) {
            #pragma unroll
            for (int r = 0; r < kRows; ++r) {
                #pragma unroll
                for (int c = 0; c < kKeys; c += 4) {
                    const float4 some = *reinterpret_cast<const float4 *>(own((r * kKeys + c) / 4));
                    scores(r, c) = __fmaf_rn(some.x, inverse_scale, scores(r, c));
                    scores(r, c + 1) = __fmaf_rn(some.y, inverse_scale, scores(r, c + 1));
                    scores(r, c + 2) = __fmaf_rn(some.z, inverse_scale, scores(r, c + 2));
                    scores(r, c + 3) = __fmaf_rn(some.w, inverse_scale, scores(r, c + 3));
                }
            }
        } else {
            #pragma unroll
            for (int r = 0; r < kRows; r += 2) {
                uint32_t words[kKeys];
                #pragma unroll
                for (int c = 0; c < kKeys; c += 4) {
                    const uint4 some = *own((r * kKeys / 2 + c) / 4);
                    words[c] = some.x, words[c + 1] = some.y, words[c + 2] = some.z, words[c + 3] = some.w;
                }
                Product<Element>::add(params.fork.scores, words, r, 0, scores);
            }
        }
    }

private:
    // The thread's part of shared memory, sixteen bytes at a time: nobody else reads it.
    static __forceinline__ __device__ uint4 *own(const int i) {
        extern __shared__ char smem_[];
        return reinterpret_cast<uint4 *>(
                   smem_ + 2 * (kGradientTiles<Traits> + 2 * Traits::kBlockM * int(sizeof(float))))
            + i * Traits::kNThreads + threadIdx.x;
    }
};

template<typename Traits, bool Is_causal, typename Params>
__forceinline__ __device__ void compute_gradient(const Params &params) {
    using namespace cute;
    using Element = typename Traits::Element;
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    constexpr int kWarpsM = Traits::AtomLayoutMSdP, kWarpsN = Traits::kNWarps / kWarpsM;
    constexpr int kRows = 2 * kBlockM / (16 * kWarpsM), kKeys = kBlockN / kWarpsN / 4;  // of a thread
    constexpr int kMmaN =
        kBlockN / decltype(typename Traits::TiledMmaSdP{}.template tile_size_mnk<1>())::value;
    extern __shared__ char smem_[];
    const Gradient &gradient = params.fork_bwd.bias_gradient;
    const int thread = threadIdx.x, lane = thread % 32;

    // Blocks of keys first: those of the same rows run side by side.
    const int key_blocks = ceil_div(params.seqlen_k, kBlockN),
              row_blocks = gradient.rows_share ? 1 : ceil_div(params.seqlen_q, kBlockM);
    const int slices = params.h / gradient.heads_per_slice;
    const int tile = blockIdx.x, n_block = tile % key_blocks,
              row_block = gradient.rows_share ? -1 : tile / key_blocks % row_blocks;
    const int unit = tile / key_blocks / row_blocks, part = unit % gradient.parts,
              slice_of = unit / gradient.parts;
    const int own_batch = slice_of / slices, own_slice = slice_of % slices;
    const int heads = gradient.heads_per_slice / gradient.head_parts,
              first_head = own_slice * gradient.heads_per_slice + part % gradient.head_parts * heads;
    const int batch_parts = gradient.parts / gradient.head_parts, batches = ceil_div(params.b, batch_parts),
              first_batch = part / gradient.head_parts * batches;
    BiasUse<Traits, Params> use(params, n_block, first_head, first_head + heads,
        gradient.batch_shares ? first_batch : own_batch,
        gradient.batch_shares ? min(first_batch + batches, params.b) : own_batch + 1, row_block);
    const BlockInfo</*Varlen=*/true> own(params, own_batch);
    const int first_row = max(row_block, 0) * kBlockM,
              end_row = gradient.rows_share ? kBlockM : own.actual_seqlen_q;
    if (first_row >= end_row) { return; }

    const ThreadTile thread_tile{first_row + thread / 32 % kWarpsM * 16 + lane / 4, kWarpsM * 16};
    const int first_key = n_block * kBlockN + thread / 32 / kWarpsM * (kBlockN / kWarpsN);
    // Bits of elements
    const auto exist = [&](const int r) {
        return thread_tile.row_of(r) < end_row
            ? Visible<kRows, kKeys>::before(params.seqlen_k - ThreadTile::key_of(first_key, 0))
            : 0;
    };

    // All uses of the tile have the same bias.
    OwnBias<Traits, kRows, kKeys> bias(params,
        slice<char>(
            params.fork.scores.bias, own, own_batch, first_head, params.fork.scores.bias_is_float ? 4 : 2),
        thread_tile, first_key, exist);
    Tensor sum = make_tensor<float>(Shape<Int<kRows>, Int<kKeys>>{});
    clear(sum);

    // The tiles that are worked on, or of two the other.
    int stage = 0;
    const auto tile_of = [&](const int at, const int first, auto layout) {
        return make_tensor(
            make_smem_ptr(reinterpret_cast<Element *>(smem_ + at * kGradientTiles<Traits>) + first), layout);
    };
    const auto row_tile = [&](const int at, const bool is_do) {
        return tile_of(at, is_do * size(typename Traits::SmemLayoutQdO{}), typename Traits::SmemLayoutQdO{});
    };
    const auto key_tile = [&](const int at, const bool is_v) {
        return tile_of(at,
            2 * size(typename Traits::SmemLayoutQdO{}) + is_v * size(typename Traits::SmemLayoutKV{}),
            typename Traits::SmemLayoutKV{});
    };
    // Lse, then d
    const auto row_values = [&](const int at) {
        return reinterpret_cast<float *>(smem_ + 2 * kGradientTiles<Traits>) + at * 2 * kBlockM;
    };

    // A tile of q or dO, and one of k or v: a group of copies.
    const auto fetch = [&](auto rows, const void *q, const int64_t q_batch, const int64_t q_row,
                           const int64_t q_head, auto keys, const void *k, const int64_t k_batch,
                           const int64_t k_row, const int64_t k_head) {
        if (use.found) {
            const BlockInfo</*Varlen=*/true> binfo(params, use.bidb);
            const int64_t row =
                binfo.q_offset(q_batch, q_row, use.bidb) + use.m_block * kBlockM * q_row + use.bidh * q_head;
            const int64_t key =
                binfo.k_offset(k_batch, k_row, use.bidb) + n_block * kBlockN * k_row + use.key_head * k_head;
            fetch_tile<Traits>(rows, static_cast<const Element *>(q) + row, q_row,
                binfo.actual_seqlen_q - use.m_block * kBlockM, params.d);
            fetch_tile<Traits>(keys, static_cast<const Element *>(k) + key, k_row,
                binfo.actual_seqlen_k - n_block * kBlockN, params.d);
        }
        cute::cp_async_fence();
    };
    const auto fetch_qk = [&](const int at) {
        fetch(row_tile(at, false), params.q_ptr, params.q_batch_stride, params.q_row_stride,
            params.q_head_stride, key_tile(at, false), params.k_ptr, params.k_batch_stride,
            params.k_row_stride, params.k_head_stride);
    };
    const auto fetch_dov = [&](const int at) {
        fetch(row_tile(at, true), params.do_ptr, params.do_batch_stride, params.do_row_stride,
            params.do_head_stride, key_tile(at, true), params.v_ptr, params.v_batch_stride,
            params.v_row_stride, params.v_head_stride);
    };

    // Of a row: its lse, or its d as the kernel of dq, dk and dv finds it; for rows that are not there what
    // gives nothing, and NaN past a max_seqlen_q that is too short. Where it lies, or null.
    const auto row_value = [&](const bool is_d, const int row, float &otherwise) -> const float * {
        const BlockInfo</*Varlen=*/true> binfo(params, use.bidb);
        const int64_t column = int64_t(use.bidb) * params.h + use.bidh;
        otherwise = !is_d ? INFINITY : row >= binfo.actual_seqlen_q ? 0.f : NAN;
        if (row >= binfo.actual_seqlen_q || (is_d && row >= params.seqlen_q)) { return nullptr; }
        if (is_d) {
            return static_cast<const float *>(params.dsoftmax_sum) + row
                + (params.unpadded_lse ? use.bidh * (int64_t(params.total_q) + 128 * params.b)
                            + binfo.q_offset(int64_t(params.seqlen_q_rounded), int64_t(1), use.bidb)
                            + 128 * use.bidb
                                       : column * params.seqlen_q_rounded);
        }
        return static_cast<const float *>(params.softmax_lse_ptr) + row
            + (params.unpadded_lse ? int64_t(use.bidh) * params.total_q
                        + binfo.q_offset(int64_t(params.seqlen_q), int64_t(1), use.bidb)
                                   : column * params.seqlen_q);
    };
    const auto fetch_rows = [&](const int at) {
        static_assert(2 * kBlockM <= Traits::kNThreads);
        if (!use.found || thread >= 2 * kBlockM) { return; }
        float otherwise, *to = row_values(at) + thread;
        const float *from = row_value(thread >= kBlockM, use.m_block * kBlockM + thread % kBlockM, otherwise);
        if (from != nullptr) {
            asm volatile(
                "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(to)), "l"(from)
                : "memory");
        } else {
            *to = otherwise;
        }
    };

    typename Traits::TiledMmaSdP tiled_mma;
    auto thr_mma = tiled_mma.get_thread_slice(thread);
    auto copy_rows = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, tiled_mma);
    auto thr_copy_rows = copy_rows.get_thread_slice(thread);
    auto copy_keys = make_tiled_copy_B_warpcontiguousN<kMmaN>(typename Traits::SmemCopyAtom{}, tiled_mma);
    auto thr_copy_keys = copy_keys.get_thread_slice(thread);
    const auto product = [&](auto &acc, const auto &sRows, const auto &sKeys) {
        Tensor a = thr_mma.partition_fragment_A(sRows);
        Tensor b = thr_mma.partition_fragment_B(sKeys);
        FLASH_NAMESPACE::gemm(acc, a, b, thr_copy_rows.partition_S(sRows), thr_copy_keys.partition_S(sKeys),
            tiled_mma, copy_rows, copy_keys, thr_copy_rows, thr_copy_keys);
    };

    use.next(/*is_first=*/true);
    if (kInShared<Traits>) { fetch_rows(0); }
    fetch_qk(0);
    fetch_dov(0);
    while (use.found) {
        const int bidb = use.bidb, bidh = use.bidh, m_block = use.m_block;
        const BlockInfo</*Varlen=*/true> binfo(params, bidb);
        const ThreadTile at{m_block * kBlockM + thread / 32 % kWarpsM * 16 + lane / 4, kWarpsM * 16};
        Visible<kRows, kKeys> visible;
        const bool any = visible.load(params, binfo, bidb, bidh, at, first_key, num_keys(params, binfo));
        Tensor lse = make_tensor<float>(Shape<Int<kRows>>{}), d = make_tensor<float>(Shape<Int<kRows>>{});
        bool any_visible = true;  // some row of the tile sees a key; not asked where there is no mask
        if constexpr (kInShared<Traits>) {
            FLASH_NAMESPACE::cp_async_wait<0>();
            any_visible = __syncthreads_or(any);
            use.next(/*is_first=*/false);
            fetch_rows(1 - stage);
            fetch_qk(1 - stage);
            fetch_dov(1 - stage);
            #pragma unroll
            for (int r = 0; r < kRows; ++r) { lse(r) = row_values(stage)[at.row_of(r) - m_block * kBlockM]; }
        } else {
            any_visible = params.fork.scores.mask.ptr == nullptr || __syncthreads_or(any);
            #pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const float *from = row_value(false, at.row_of(r), lse(r));
                if (from != nullptr) { lse(r) = *from; }
                from = row_value(true, at.row_of(r), d(r));
                if (from != nullptr) { d(r) = *from; }
            }
            use.next(/*is_first=*/false);
            FLASH_NAMESPACE::cp_async_wait<1>();
            __syncthreads();
        }

        Tensor acc_s = partition_fragment_C(tiled_mma, Shape<Int<kBlockM>, Int<kBlockN>>{});
        Tensor scores = make_tensor(acc_s.data(), FLASH_NAMESPACE::convert_layout_acc_rowcol(acc_s.layout()));
        clear(acc_s);
        if (any_visible) { product(acc_s, row_tile(stage, false), key_tile(stage, false)); }
        if constexpr (!kInShared<Traits>) {
            __syncthreads();
            fetch_qk(0);
        }
        if (any_visible) {
            if (params.softcap > 0.f) { FLASH_NAMESPACE::apply_softcap(acc_s, params.softcap); }
            bias.add(scores);
            if (params.alibi_slopes_ptr != nullptr) {
                const float slope =
                    static_cast<const float *>(
                        params.alibi_slopes_ptr)[bidb * params.alibi_slopes_batch_stride + bidh]
                    / params.scale_softmax;
                FLASH_NAMESPACE::Alibi<Is_causal>(slope, binfo.actual_seqlen_k, binfo.actual_seqlen_q)
                    .apply_alibi(scores, first_key, at.row, at.warp_row_stride);
            }
            visible.hide(scores);
            FLASH_NAMESPACE::scale_apply_exp2</*Scale_max=*/false>(scores, lse, params.scale_softmax_log2);
        }

        if constexpr (kInShared<Traits>) {
            #pragma unroll
            for (int r = 0; r < kRows; ++r) {
                d(r) = row_values(stage)[kBlockM + at.row_of(r) - m_block * kBlockM];
            }
        }
        Tensor acc_dp = partition_fragment_C(tiled_mma, Shape<Int<kBlockM>, Int<kBlockN>>{});
        Tensor dp = make_tensor(acc_dp.data(), FLASH_NAMESPACE::convert_layout_acc_rowcol(acc_dp.layout()));
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            #pragma unroll
            for (int c = 0; c < kKeys; ++c) { dp(r, c) = -d(r); }
        }
        if constexpr (!kInShared<Traits>) {
            FLASH_NAMESPACE::cp_async_wait<1>();
            __syncthreads();
        }
        if (any_visible) { product(acc_dp, row_tile(stage, true), key_tile(stage, true)); }
        if constexpr (kInShared<Traits>) {
            stage = 1 - stage;
        } else {
            __syncthreads();
            fetch_dov(0);
        }
        if (!any_visible) { continue; }
        // The probabilities of hidden scores are 0.
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            #pragma unroll
            for (int c = 0; c < kKeys; ++c) { sum(r, c) = __fmaf_rn(scores(r, c), dp(r, c), sum(r, c)); }
        }
    }
    FLASH_NAMESPACE::cp_async_wait<0>();

    const int bytes = gradient.is_float ? 4 : 2;
    char *to = static_cast<char *>(gradient.ptr)
        + (part * gradient.part_stride + own_batch * gradient.batch_stride + own_slice * gradient.head_stride
              + (gradient.rows_follow ? own.sum_s_q * gradient.row_stride : 0))
            * bytes;
    if (!gradient.rows_share) {
        to += ThreadTile::key_of(first_key, 0) * bytes;
        const bool in_pairs = reinterpret_cast<uintptr_t>(to) % (2 * bytes) == 0
            && gradient.row_stride % 2 == 0 && all_exist<kRows, kKeys>(exist);
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            char *row = to + thread_tile.row_of(r) * gradient.row_stride * bytes;
            if (in_pairs) {
                #pragma unroll
                for (int c = 0; c < kKeys; c += 2) {
                    if (gradient.is_float) {
                        *reinterpret_cast<float2 *>(row + c * 16) = make_float2(sum(r, c), sum(r, c + 1));
                    } else {
                        const Element pair[2] = {Element(sum(r, c)), Element(sum(r, c + 1))};
                        *reinterpret_cast<uint32_t *>(row + c * 8) =
                            *reinterpret_cast<const uint32_t *>(pair);
                    }
                }
            } else {
                #pragma unroll
                for (int c = 0; c < kKeys; ++c) {
                    store_gradient<Element>(
                        exist(r), 1u << c, row + (c / 2 * 8 + c % 2) * bytes, sum(r, c), gradient.is_float);
                }
            }
        }
        return;
    }
    float *sums = reinterpret_cast<float *>(smem_);  // of each warp's rows
    __syncthreads();
    #pragma unroll
    for (int c = 0; c < kKeys; ++c) {
        float own_sum = sum(0, c);
        #pragma unroll
        for (int r = 1; r < kRows; ++r) { own_sum += sum(r, c); }
        #pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
            own_sum += __shfl_xor_sync(0xffffffff, own_sum, lanes);
        }
        if (lane < 4) {
            sums[thread / 32 % kWarpsM * kBlockN + ThreadTile::key_of(first_key, c) - n_block * kBlockN] =
                own_sum;
        }
    }
    __syncthreads();
    if (thread < kBlockN) {
        float total = sums[thread];
        #pragma unroll
        for (int warp = 1; warp < kWarpsM; ++warp) { total += sums[warp * kBlockN + thread]; }
        const int key = n_block * kBlockN + thread;
        store_gradient<Element>(key < params.seqlen_k, 1, to + key * bytes, total, gradient.is_float);
    }
}

template<typename Traits, bool Is_causal>
__global__ void __launch_bounds__(Traits::kNThreads, kInShared<Traits> ? 2 : 1)
    fork_bias_gradient_kernel(__grid_constant__ const Flash_bwd_params params) {
    compute_gradient<Traits, Is_causal>(params);
}

// Behind the kernel of dq, dk and dv; or does nothing, where no gradient of a bias is asked for.
template<typename Kernel_traits, bool Is_causal>
void run_gradient(const Flash_bwd_params &params, cudaStream_t stream) {
    using Traits = GradientTraits<Kernel_traits>;
    const Gradient &gradient = params.fork_bwd.bias_gradient;
    if (gradient.ptr == nullptr) { return; }
    const auto blocks = [](const int64_t size, const int block) { return (size + block - 1) / block; };
    const int64_t units = (gradient.batch_shares ? 1 : params.b) * (params.h / gradient.heads_per_slice)
        * int64_t(gradient.parts) * (gradient.rows_share ? 1 : blocks(params.seqlen_q, Traits::kBlockM))
        * blocks(params.seqlen_k, Traits::kBlockN);
    auto kernel = &fork_bias_gradient_kernel<Traits, Is_causal>;
    const int smem_size = gradient_smem<Traits>(params.fork.scores.bias_is_float);
    if (smem_size >= 48 * 1024) {
        C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
            gradient_smem<Traits>(/*bias_is_float=*/true)));
    }
    kernel<<<units, Traits::kNThreads, smem_size, stream>>>(params);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace fork_bias
}  // namespace FLASH_NAMESPACE

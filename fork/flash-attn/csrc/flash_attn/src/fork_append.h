// New keys and values into the cache, and rotary embeddings: in place of upstream's copies, which are
// unrolled for a whole tile of keys in each kernel. Bits are upstream's, but nothing is written past a
// cache's end. Each thread takes 16 bytes of a row a turn.

#pragma once

#include <cute/tensor.hpp>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>

#include "namespace_config.h"
#include "fork_fold.h"

namespace FLASH_NAMESPACE {
namespace fork_append {

template<typename Element, int N>
using Run = cutlass::AlignedArray<Element, N, N * sizeof(Element)>;

template<int N, typename Element>
__forceinline__ __device__ Run<Element, N> load(const Element *from) {
    return *reinterpret_cast<const Run<Element, N> *>(from);
}

template<int N, typename Element>
__forceinline__ __device__ void store(Element *to, const Run<Element, N> &run) {
    *reinterpret_cast<Run<Element, N> *>(to) = run;
}

template<int N, typename Element>
__forceinline__ __device__ cutlass::Array<float, N> load_float(const Element *from) {
    return cutlass::NumericArrayConverter<float, Element, N>::convert(load<N>(from));
}

// Columns col to col + 8 of a row, turned by its position. The sums are those that nvcc makes of upstream's
// expressions.
template<typename Element, typename Params>
__forceinline__ __device__ Run<Element, 8> load_turned(
    const Params &params, const Element *row, const int col, const int64_t position) {
    const Run<Element, 8> loaded = load<8>(row + col);
    if (col >= params.rotary_dim) { return loaded; }
    const int half = params.rotary_dim / 2;
    const Element *cos_row = reinterpret_cast<const Element *>(params.rotary_cos_ptr) + position * half;
    const Element *sin_row = reinterpret_cast<const Element *>(params.rotary_sin_ptr) + position * half;
    const cutlass::Array<float, 8> x = cutlass::NumericArrayConverter<float, Element, 8>::convert(loaded);
    cutlass::Array<float, 8> turned;
    if (params.is_rotary_interleaved) {
        const cutlass::Array<float, 4> cos = load_float<4>(cos_row + col / 2),
                                       sin = load_float<4>(sin_row + col / 2);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            turned[2 * i] = __fmaf_rn(x[2 * i], cos[i], -__fmul_rn(x[2 * i + 1], sin[i]));
            turned[2 * i + 1] = __fmaf_rn(x[2 * i], sin[i], __fmul_rn(x[2 * i + 1], cos[i]));
        }
    } else {
        const bool left = col < half;
        const int pair = left ? col : col - half;
        const cutlass::Array<float, 8> cos = load_float<8>(cos_row + pair),
                                       sin = load_float<8>(sin_row + pair);
        const cutlass::Array<float, 8> other = load_float<8>(row + (left ? col + half : pair));
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            turned[i] = __fmaf_rn(x[i], cos[i], __fmul_rn(other[i], left ? -sin[i] : sin[i]));
        }
    }
    Run<Element, 8> run;
    static_cast<cutlass::Array<Element, 8> &>(run) =
        cutlass::NumericArrayConverter<Element, float, 8>::convert(turned);
    return run;
}

// The new keys and values that this thread block will read, blocks n_block_min to n_block_max of a split that
// begins at split_begin, as far as the cache goes. The thread blocks of all heads of a group, and of all
// rows, write the same bits. Those that are older than the first row's window nobody reads: the thread block
// that has that row's first block of keys writes them.
template<typename Kernel_traits, typename Params, typename Info>
__forceinline__ __device__ void append(const Params &params, const Info &binfo, const bool is_local,
    const int bidb, const int bidh, const int m_block, const int split_begin, const int n_block_min,
    const int n_block_max) {
    using Element = typename Kernel_traits::Element;
    constexpr int kRuns = Kernel_traits::kHeadDim / 8;
    const int first_row_min = is_local
        ? (binfo.actual_seqlen_k - binfo.actual_seqlen_q - params.window_size_left) / Kernel_traits::kBlockN
        : 0;
    const bool has_first = m_block == 0 && split_begin <= std::max(0, first_row_min);
    const int head = bidh / params.h_h_k_ratio;
    const int bidb_cache = params.cache_batch_idx == nullptr ? bidb : params.cache_batch_idx[bidb];
    const int *pages =
        params.block_table == nullptr ? nullptr : params.block_table + bidb * params.block_table_batch_stride;
    Element *k = reinterpret_cast<Element *>(params.k_ptr) + int64_t(head) * params.k_head_stride;
    Element *v = reinterpret_cast<Element *>(params.v_ptr) + int64_t(head) * params.v_head_stride;
    const Element *knew = reinterpret_cast<const Element *>(params.knew_ptr)
        + int64_t(bidb) * params.knew_batch_stride + int64_t(head) * params.knew_head_stride;
    const Element *vnew = reinterpret_cast<const Element *>(params.vnew_ptr)
        + int64_t(bidb) * params.vnew_batch_stride + int64_t(head) * params.vnew_head_stride;
    if (pages == nullptr) {
        k += binfo.k_offset(params.k_batch_stride, params.k_row_stride, bidb_cache);
        v += binfo.k_offset(params.v_batch_stride, params.v_row_stride, bidb_cache);
    }
    const int begin = std::max(has_first ? 0 : n_block_min * Kernel_traits::kBlockN, binfo.seqlen_k_cache);
    const int end = std::min(n_block_max * Kernel_traits::kBlockN,
        std::min(binfo.actual_seqlen_k, params.seqlen_k - binfo.leftpad_k));
    #pragma unroll 1
    for (int64_t i = threadIdx.x; i < int64_t(end - begin) * kRuns; i += Kernel_traits::kNThreads) {
        const int row = begin + int(i / kRuns), col = int(i % kRuns) * 8;
        if (col >= params.d) { continue; }
        const int64_t row_new = row - binfo.seqlen_k_cache;
        const Run<Element, 8> v_run = load<8>(vnew + row_new * params.vnew_row_stride + col);
        const Run<Element, 8> k_run =
            load_turned(params, knew + row_new * params.knew_row_stride, col, int64_t(row) + binfo.leftpad_k);
        const int64_t page = pages == nullptr ? 0 : pages[row / params.page_block_size];
        const int64_t row_page = pages == nullptr ? row : row % params.page_block_size;
        store<8>(v + page * params.v_batch_stride + row_page * params.v_row_stride + col, v_run);
        store<8>(k + page * params.k_batch_stride + row_page * params.k_row_stride + col, k_run);
    }
    __syncthreads();  // all threads of the block read them next
}

// The queries of this thread block into shared memory, turned: each by its own position, or all by that of
// the first new key.
template<typename Kernel_traits, typename Params, typename Info, typename Rows, typename Shared>
__forceinline__ __device__ void load_queries(const Params &params, const Info &binfo, const int m_block,
    const bool by_row, const Rows &gQ, Shared &&sQ) {
    using Element = typename Kernel_traits::Element;
    constexpr int kRuns = Kernel_traits::kHeadDim / 8;
    const int rows =
        std::min(int(Kernel_traits::kBlockM), binfo.actual_seqlen_q - m_block * Kernel_traits::kBlockM);
    #pragma unroll 1
    for (int i = threadIdx.x; i < rows * kRuns; i += Kernel_traits::kNThreads) {
        const int row = i / kRuns, col = i % kRuns * 8;
        const int64_t position = int64_t(binfo.seqlen_k_cache) + binfo.leftpad_k
            + (by_row ? m_block * Kernel_traits::kBlockM + row : 0);
        // A row past the table of rotations is NaN.
        Run<Element, 8> run;
        if (position < 0 || position >= params.fork.rotary_rows) {
            run.fill(Element(NAN));
        } else if (col < params.d) {
            run = load_turned(params, &gQ(row, 0), col, position);
        } else {
            run.clear();
        }
        store<8>(&sQ(row, col), run);
    }
}

}  // namespace fork_append
}  // namespace FLASH_NAMESPACE

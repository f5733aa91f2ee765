// Heads of a group whose rows share tiles, where a call has a few queries of each sequence.
//
// Each head of queries has thread blocks of its own, whose tiles have 64 rows for, say, four queries. Heads
// that share keys then load and multiply them again and again. So the rows of a thread block become those of
// one head of keys: query by query, and in each query head by head. A row's arithmetic follows from its query
// and its keys, so no bit depends on which rows are its tile's.
//
// A single query without a window needs none of this: core/forward.cpp makes its heads the rows of one head.

#pragma once

#include <cute/tensor.hpp>

#include "namespace_config.h"

namespace FLASH_NAMESPACE {
namespace fork_group {

using namespace cute;

// Built into split kernels that may append, which run such calls; others spare the registers.
template<bool kBuilt>
class Group {
public:
    __forceinline__ __device__ Group() : size_(1) {}
    template<typename Params>
    __forceinline__ __device__ explicit Group(const Params &params) : size_(kBuilt ? params.fork.group : 1) {}

    __forceinline__ __device__ bool shares() const { return kBuilt && size_ > 1; }

    // Of a row: its query, and its head, where bidh is the thread block's.
    __forceinline__ __device__ int query(const int row) const { return shares() ? row / size_ : row; }
    __forceinline__ __device__ int head(const int bidh, const int row) const {
        return shares() ? bidh * size_ + row % size_ : bidh;
    }
    // Of so many queries.
    __forceinline__ __device__ int rows(const int queries) const {
        return kBuilt ? queries * size_ : queries;
    }

    // As upstream's copy, of rows that lie where their query and head do.
    template<bool Is_even_K, typename Params, typename Info, typename TiledCopy, typename Source,
        typename Target, typename Identity, typename Predicate>
    __forceinline__ __device__ void copy_queries(const Params &params, const Info &binfo, const int bidb,
        const int bidh, const int first_row, TiledCopy tiled_copy, const Source &S, Target &D,
        const Identity &identity_MN, const Predicate &predicate_K) const {
        using Element = typename Source::value_type;
        const auto *sequence = static_cast<const Element *>(params.q_ptr)
            + binfo.q_offset(params.q_batch_stride, params.q_row_stride, bidb) + get<1>(identity_MN(0, 0, 0));
        #pragma unroll
        for (int m = 0; m < cute::size<1>(S); ++m) {
            const int row = first_row + get<0>(identity_MN(0, m, 0));
            if (query(row) >= binfo.actual_seqlen_q) { continue; }
            const auto from = make_tensor(make_gmem_ptr(sequence + query(row) * params.q_row_stride
                                              + head(bidh, row) * params.q_head_stride),
                S(_, _0{}, _).layout());
            #pragma unroll
            for (int k = 0; k < cute::size<2>(S); ++k) {
                if (Is_even_K || predicate_K(k)) {
                    cute::copy(tiled_copy, from(_, k), D(_, m, k));
                } else {
                    cute::clear(D(_, m, k));
                }
            }
        }
    }

private:
    const int size_;  // heads whose rows share tiles; 1: none do
};

}  // namespace fork_group
}  // namespace FLASH_NAMESPACE

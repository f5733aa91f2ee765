// Keys in pages that are smaller than a tile, or of another size than its multiples. Each lane of a warp
// looks up where the rows of one copy begin, a tile ahead, and hands it to the warp. The rows of larger pages
// follow from the tile's first.

#pragma once

#include <cute/tensor.hpp>

#include "namespace_config.h"
#include "utils.h"

namespace FLASH_NAMESPACE {
namespace fork_pages {

using namespace cute;

// The page of a key, in pages of `size` tokens.
__forceinline__ __device__ int page_of(const int key, const int size) {
    return (size & (size - 1)) == 0 ? key >> __popc(size - 1) : key / size;
}

// Whether a call's keys lie in such pages.
template<typename Kernel_traits, typename Params>
bool small(const Params &params) {
    return params.block_table != nullptr && params.page_block_size % Kernel_traits::kBlockN != 0;
}

// Built into kernels that append, which run such calls; others spare the registers. kSkips: some tiles are
// left out.
template<typename Kernel_traits, bool kBuilt, bool kSkips, typename Params>
class Pages {
    static constexpr int kGranule = 16;  // a page has a multiple of so many tokens
    static constexpr int kBlockN = Kernel_traits::kBlockN;
    static constexpr int kThreadsPerRow = Kernel_traits::kGmemThreadsPerRow;
    static constexpr int kRows = Kernel_traits::kNThreads / kThreadsPerRow;  // of a tile that one copy brings
    // The rows that a warp copies at once lie in one page, and a lane can look up each of its copies.
    static_assert(kGranule % (32 / kThreadsPerRow) == 0 && kRows % kGranule == 0 && kBlockN / kRows <= 32);

public:
    // Of a sequence with this table, which becomes null where rows are addressed here: to the rest of the
    // kernel, keys then lie one after another, from k_begin on.
    __forceinline__ __device__ Pages(const Params &params, const int *&table)
        : params_(params),
          table_(!kBuilt || table == nullptr || params.page_block_size % kBlockN == 0 ? nullptr : table) {
        if (table_ != nullptr) { table = nullptr; }
    }

    // Where keys and values begin, in elements.
    __forceinline__ __device__ int64_t begin(const int64_t without_pages) const {
        return table_ == nullptr ? without_pages : 0;
    }

    // Each as upstream's copy, of the tile whose first key is `begin` and lies where S says. The keys of a
    // tile come before its values, and tiles from the last to the first; kIsNext: the tile before was copied.
    template<bool kIsNext, bool Is_even_MN, bool Is_even_K, typename... Rest>
    __forceinline__ __device__ void copy_keys(const int begin, const int64_t page_stride,
        const int64_t row_stride, const int max_MN, Rest &&...rest) {
        if (table_ != nullptr) {
            const bool known = kSkips ? begin == ahead_of_ : kIsNext;
            page_ = known ? ahead_ : looked_up(begin, Is_even_MN ? kBlockN : max_MN);
            if (kSkips) { ahead_of_ = begin - kBlockN; }
            if (begin >= kBlockN) { ahead_ = looked_up(begin - kBlockN, kBlockN); }
        }
        copy_values<Is_even_MN, Is_even_K>(begin, page_stride, row_stride, max_MN, rest...);
    }
    template<bool Is_even_MN, bool Is_even_K, bool Clear_OOB_MN = false, typename TiledCopy, typename Source,
        typename Target, typename Identity, typename Predicate>
    __forceinline__ __device__ void copy_values(const int begin, const int64_t page_stride,
        const int64_t row_stride, const int max_MN, TiledCopy tiled_copy, const Source &S, Target &D,
        const Identity &identity_MN, const Predicate &predicate_K) const {
        if (table_ == nullptr) {
            FLASH_NAMESPACE::copy<Is_even_MN, Is_even_K, Clear_OOB_MN>(
                tiled_copy, S, D, identity_MN, predicate_K, max_MN);
            return;
        }
        using Element = typename Kernel_traits::Element;
        const uint32_t unit = uint32_t(sizeof(Element)) << params_.fork.page_shift;
        // Of this lane's copy, beyond the thread's row of the pool's first granule.
        const int key = key_of(begin);
        const uint32_t own = uint32_t(page_) * uint32_t(page_stride >> params_.fork.page_shift)
            + uint32_t(key - page_of(key, params_.page_block_size) * params_.page_block_size)
                * uint32_t(row_stride >> params_.fork.page_shift);
        const auto *pool = reinterpret_cast<const char *>(
            raw_pointer_cast(S.data()) - int64_t(key - lane() * kRows) * row_stride);
        #pragma unroll
        for (int m = 0; m < cute::size<1>(S); ++m) {
            const uint64_t offset = uint64_t(__shfl_sync(kWarp, own, m)) * unit;
            const auto rows = make_tensor(
                make_gmem_ptr(reinterpret_cast<const Element *>(pool + offset)), S(_, _0{}, _).layout());
            if (Is_even_MN || get<0>(identity_MN(0, m, 0)) < max_MN) {
                #pragma unroll
                for (int k = 0; k < cute::size<2>(S); ++k) {
                    if (Is_even_K || predicate_K(k)) {
                        cute::copy(tiled_copy, rows(_, k), D(_, m, k));
                    } else {
                        cute::clear(D(_, m, k));
                    }
                }
            } else if (Clear_OOB_MN) {
                cute::clear(D(_, m, _));
            }
        }
    }

private:
    // The first key of this lane's copy, in the tile's warp.
    static __forceinline__ __device__ int key_of(const int begin) {
        return begin + int(threadIdx.x) / kThreadsPerRow / kGranule * kGranule + lane() * kRows;
    }
    // The page of this lane's copy, or of the last of the tile's first `rows` rows.
    __forceinline__ __device__ int looked_up(const int begin, const int rows) const {
        const int last = begin + max(min(rows, kBlockN), 1) - 1;
        return table_[page_of(min(key_of(begin), last), params_.page_block_size)];
    }
    static __forceinline__ __device__ int lane() { return threadIdx.x % 32; }

    static constexpr unsigned kWarp = 0xffffffff;

    const Params &params_;    // offsets of pages are in units of 2^page_shift elements, in 32 bits
    const int *const table_;  // null: a tile's rows lie as if one after another
    // This lane's pages: of the tile at hand, and of the tile ahead. With kSkips, that one begins at
    // ahead_of_.
    int page_ = 0, ahead_ = 0, ahead_of_ = -1;
};

}  // namespace fork_pages
}  // namespace FLASH_NAMESPACE

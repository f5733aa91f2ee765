// Tiles of keys or values on their way to shared memory, from the last of a thread block to its first: copied
// by threads that do nothing else.
//
// A page has a multiple of 16 rows, and a warp copies fewer at once, so these lie in one page. Each lane of a
// warp finds where the rows of one copy lie, 32 copies ahead, and hands it to the others.

#pragma once

#include <algorithm>

#include <cute/tensor.hpp>

#include "namespace_config.h"
#include "fork_pages.h"

namespace FLASH_NAMESPACE {

// kThreads: of the threads that copy, from 0 on.
template<typename Kernel_traits, bool Is_even_K, int kThreads>
class TileCopies {
    using Element = typename Kernel_traits::Element;
    static constexpr int kBlockN = Kernel_traits::kBlockN, kGranule = 16;
    static constexpr int kPanel = Kernel_traits::kBlockKSmem, kPanels = Kernel_traits::kHeadDim / kPanel;
    static constexpr int kRun = 16 / sizeof(Element), kThreadsPerRow = kPanel / kRun;
    static constexpr int kRows = kThreads / kThreadsPerRow;  // that one copy brings
    static constexpr int kCopies = kBlockN / kRows;          // of a tile
    static_assert(kRows % kGranule == 0 && kGranule % (32 / kThreadsPerRow) == 0 && 32 % kCopies == 0);
    static constexpr int kTiles = 32 / kCopies;  // that a warp looks up at once

public:
    // `begin`: of the sequence without pages, of the pool with them. `rows`: so many are there. `last`: the
    // tile to begin with.
    __forceinline__ __device__ TileCopies(const Element *begin, const int64_t page_stride,
        const int64_t row_stride, const int *table, const int page_size, const int head_dim, const int rows,
        const int last)
        : begin_(begin + row() % kGranule * row_stride + col()),
          page_stride_(page_stride),
          row_stride_(row_stride),
          table_(table),
          page_size_(page_size),
          head_dim_(head_dim),
          rows_(rows) {
        look_up(last / kTiles);
    }

    // Sends for the next tile, which is n_block. Rows that are not there, and columns past the head dim, are
    // zeros.
    __forceinline__ __device__ void send(Element *tile, const int n_block) {
        Element *const to = tile + typename Kernel_traits::SmemLayoutKV{}(row(), col());
        const int rest = rows_ - n_block * kBlockN - row();
        if (n_block / kTiles != group_) {
            group_ = n_block / kTiles;
            of_lane_ = page_ * page_stride_ + row_in_page_ * row_stride_;
            if (group_ > 0) { look_up(group_ - 1); }
        }
        #pragma unroll
        for (int m = 0; m < kCopies; ++m) {
            const Element *const from =
                begin_ + __shfl_sync(0xffffffff, of_lane_, n_block % kTiles * kCopies + m);
            #pragma unroll
            for (int k = 0; k < kPanels; ++k) {
                cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
                    *reinterpret_cast<const cute::uint128_t *>(from + k * kPanel),
                    *reinterpret_cast<cute::uint128_t *>(to + (k * kBlockN + m * kRows) * kPanel),
                    m * kRows < rest && (Is_even_K || col() + k * kPanel < head_dim_));
            }
        }
    }

private:
    static __forceinline__ __device__ int row() { return threadIdx.x / kThreadsPerRow; }
    static __forceinline__ __device__ int col() { return threadIdx.x % kThreadsPerRow * kRun; }

    __forceinline__ __device__ void look_up(const int group) {
        const int first = group * 32 + threadIdx.x % 32;  // of all copies
        const int key = std::min(first * kRows + row() / kGranule * kGranule, std::max(rows_ - 1, 0));
        row_in_page_ = key;
        if (table_ != nullptr) {
            const int page = fork_pages::page_of(key, page_size_);
            row_in_page_ -= page * page_size_;
            page_ = table_[page];
        }
    }

    const Element *const begin_;  // of this thread's columns, and of its row of 16
    const int64_t page_stride_, row_stride_;
    const int *const table_;
    const int page_size_, head_dim_, rows_;
    int64_t of_lane_;             // where the rows begin
    int group_ = -1;              // of tiles
    int page_ = 0, row_in_page_;  // where those of the next group do
};

}  // namespace FLASH_NAMESPACE

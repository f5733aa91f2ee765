// attn_mask and attn_bias of simple calls, whose kernels ask for little.
//
// Simple is a call of sequences of one length, without slopes, softcap, window and new keys. Its mask, if it
// has one, all queries share; forward, its rows may also begin at multiples of sixteen bytes, with keys that
// follow each other. So does its bias, which is of the queries' type. It takes upstream's kernels, which mask
// edges as they do, with a few instructions more. What other calls ask at run time spreads a loop over much
// cold code, and takes registers that accumulators need.

#pragma once

#include <cute/tensor.hpp>

#include "namespace_config.h"
#include "block_info.h"
#include "flash.h"
#include "fork_bias.h"
#include "fork_backward_tiles.h"
#include "fork_walking.h"
#include "fork_occupancy.h"
#include "fork_product.h"
#include "fork_stage.h"
#include "fork_tile.h"

namespace FLASH_NAMESPACE {
namespace fork_bias {

template<typename Kernel_traits>
struct Simple : Kernel_traits {};

template<typename Kernel_traits>
constexpr bool Is_simple = false;
template<typename Kernel_traits>
constexpr bool Is_simple<Simple<Kernel_traits>> = true;
template<typename Kernel_traits>
constexpr bool Is_simple<Walking<Simple<Kernel_traits>>> = true;
template<typename Kernel_traits>
constexpr bool Has_scores<Simple<Kernel_traits>> = true;

// Of Stage's arguments, elements of so many bytes: a warp's rows without a gap between them. A row's pieces
// are exchanged, so that those of eight rows that ldmatrix reads at once are in different banks.
template<typename Staged, int kSize = 2>
struct Pieces;
template<int kWarps, int kTiles, int kTileStride, int kKeys, int kSize>
struct Pieces<Stage<kWarps, kTiles, kTileStride, kKeys>, kSize> {
    static constexpr int kRows = 16, kPitch = kKeys * kSize, kPerRow = kPitch / kPiece,
                         kAtOnce = 32 / kPerRow;
    static constexpr int kBytes = kWarps * kTiles * kRows * kPitch;
    static_assert(kPerRow >= 2 && kPerRow <= 16);

    // The warp's part, from its first row and key on: so many rows and keys, and zeros behind them.
    static __forceinline__ __device__ void fetch(
        const int stage_at, const char *first, const int64_t row_stride, const int rows, const int keys) {
        const int lane = threadIdx.x % 32, piece = lane % kPerRow, row = lane / kPerRow;
        const uint32_t to = own(stage_at), at = row * kPitch + (piece ^ exchanged(row)) * kPiece;
        const char *from = first + row * row_stride + piece * kPiece;
        if (rows >= (kTiles - 1) * kTileStride + kRows && keys >= kKeys) {
            #pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const char *tile_from = from + tile * kTileStride * row_stride;
                #pragma unroll
                for (int i = 0; i < kRows; i += kAtOnce) {
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                     to + (at ^ exchanged(i) * kPiece) + (tile * kRows + i) * kPitch),
                        "l"(tile_from)
                        : "memory");
                    tile_from += kAtOnce * row_stride;
                }
            }
            return;
        }
        const int bytes = min(max(keys * kSize - piece * kPiece, 0), kPiece);
        #pragma unroll 1
        for (int i = 0; i < kTiles * kRows; i += kAtOnce) {
            const int in_memory = i / kRows * kTileStride + i % kRows;
            const bool exists = in_memory + row < rows && bytes > 0;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                             to + (at ^ exchanged(i % kRows) * kPiece) + i * kPitch),
                "l"(exists ? from + in_memory * row_stride : first), "r"(exists ? bytes : 0)
                : "memory");
        }
    }

    // Adds the thread's part to its scores: the bits that Stage gives.
    template<typename Element, typename Scores>
    static __forceinline__ __device__ void add(const Params &params, Scores &scores) {
        constexpr int kOwnKeys = kKeys / 4, kGroup = kOwnKeys < 16 ? kOwnKeys : 16;
        static_assert(decltype(cute::size<0>(scores))::value == 2 * kTiles
            && decltype(cute::size<1>(scores))::value == kOwnKeys);
        const int lane = threadIdx.x % 32, row = lane % 16;
        const uint32_t from = own(params.stage_at), at = row * kPitch + (lane / 16 ^ exchanged(row)) * kPiece;
        #pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            #pragma unroll
            for (int c = 0; c < kOwnKeys; c += kGroup) {
                uint32_t words[kGroup];
                #pragma unroll
                for (int i = 0; i < kGroup; i += 4) {
                    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                        : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3])
                        : "r"(from + (at ^ (c + i) / 2 * kPiece) + tile * kRows * kPitch)
                        : "memory");
                }
                Product<Element>::add(params, words, tile * 2, c, scores);
            }
        }
    }

    // All bytes of the warp's part: their or, and their and.
    static __forceinline__ __device__ uint2 summed(const int stage_at) {
        uint2 sums = {0, 0xffffffff};
        #pragma unroll
        for (int i = 0; i < kTiles * kRows * kPerRow; i += 32) {
            uint4 words;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                : "r"(own(stage_at) + (i + int(threadIdx.x) % 32) * kPiece)
                : "memory");
            sums.x |= words.x | words.y | words.z | words.w;
            sums.y &= words.x & words.y & words.z & words.w;
        }
        return sums;
    }

    // The bits of the thread's keys in one of its rows: those of bytes that are not 0.
    static __forceinline__ __device__ uint32_t bits(const int stage_at, const int r) {
        static_assert(kSize == 1 && kKeys % 32 == 0);
        const int lane = threadIdx.x % 32, row = r % 2 * 8 + lane / 4, piece = lane % 4 / 2;
        const uint32_t from = own(stage_at) + (r / 2 * kRows + row) * kPitch + lane % 2 * 8;
        uint2 octets[kKeys / 32];
        #pragma unroll
        for (int i = 0; i < kKeys / 32; ++i) {
            asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                : "=r"(octets[i].x), "=r"(octets[i].y)
                : "r"(from + ((piece + i * 2) ^ exchanged(row)) * kPiece)
                : "memory");
        }
        return Visible<1, kKeys / 4>::of_octets(octets);
    }

private:
    // What a row's pieces are exchanged by.
    static constexpr __host__ __device__ int exchanged(const int row) {
        return kPerRow >= 8 ? row % 8 : row / (8 / kPerRow) % kPerRow;
    }

    static __forceinline__ __device__ uint32_t own(const int stage_at) {
        extern __shared__ char smem_[];
        return cute::cast_smem_ptr_to_uint(smem_) + stage_at
            + int(threadIdx.x) / 32 * kTiles * kRows * kPitch;
    }
};

// Where a row of a head begins, in elements of so many bytes.
template<int kSize = 2>
__forceinline__ __device__ const char *row_of(
    const View &view, const int bidb, const int bidh, const int row) {
    return static_cast<const char *>(view.ptr)
        + (bidb * view.batch_stride + bidh / view.heads_per_slice * view.head_stride + row * view.row_stride)
        * kSize;
}

// The scores of a thread's keys whose bit is not set become -inf: in a row, and in all.
template<typename Scores>
__forceinline__ __device__ void hide_keys_of_row(const uint32_t bits, const int r, Scores &scores) {
    #pragma unroll
    for (int c = 0; c < decltype(cute::size<1>(scores))::value; ++c) {
        scores(r, c) = bits & 1u << c ? scores(r, c) : -INFINITY;
    }
}
template<typename Scores>
__forceinline__ __device__ void hide_keys(const uint32_t bits, Scores &scores) {
    #pragma unroll
    for (int c = 0; c < decltype(cute::size<1>(scores))::value; ++c) {
        #pragma unroll
        for (int r = 0; r < decltype(cute::size<0>(scores))::value; ++r) {
            scores(r, c) = bits & 1u << c ? scores(r, c) : -INFINITY;
        }
    }
}

// The tiles of a thread block's rows in the standard kernel, from the last to the first.
//
// A mask that all queries share comes through registers. One whose rows are each query's own comes through
// shared memory, which holds the tile at hand and those below it, mask_slots in all: a warp has its own rows
// there, and needs no other to read them. Most tiles of most masks are seen or hidden whole, which takes a
// few instructions to find.
template<typename Kernel_traits>
struct SimpleForwardTiles {
    static constexpr int kBlockN = Kernel_traits::kBlockN;
    using Bias = Pieces<ForwardStage<Kernel_traits>>;
    using Own = Pieces<ForwardStage<Kernel_traits>, 1>;
    using Keys = Visible<1, kBlockN / 4>;

    const Flash_fwd_params &params;
    const int bidb, bidh, first_row;  // the warp's
    const char *const bias;           // of that row
    SharedMask<kBlockN> mask;
    // Of the thread's keys, the same for all its rows; of each query's own, whether all are seen
    uint32_t bits = Keys::kAll;

    __forceinline__ __device__ SimpleForwardTiles(
        const Flash_fwd_params &params, const int bidb, const int bidh, const int m_block)
        : params(params),
          bidb(bidb),
          bidh(bidh),
          first_row(m_block * Kernel_traits::kBlockM + int(threadIdx.x) / 32 * 16),
          bias(row_of(params.fork.scores.bias, bidb, bidh, first_row)) {}

    // The tile to begin with: n_block, or the next below that the mask does not hide, or the last.
    __forceinline__ __device__ int begin(const int n_block, const int n_block_min) {
        if (!is_shared(params.fork.scores.mask)) {
            for (int i = 0; i < params.fork.scores.mask_slots - 1; ++i) {
                fetch_own(n_block - i, n_block_min);
            }
        }
        const int first = max(seen(n_block, n_block_min, n_block + 1), n_block_min);
        fetch(first);
        return first;
    }

    template<typename Tensor>
    __forceinline__ __device__ void apply(Tensor &acc_s, const int n_block) const {
        auto scores =
            cute::make_tensor(acc_s.data(), FLASH_NAMESPACE::convert_layout_acc_rowcol(acc_s.layout()));
        if (params.fork.scores.bias.ptr != nullptr) {
            Bias::template add<typename Kernel_traits::Element>(params.fork.scores, scores);
        }
        if (bits == Keys::kAll) { return; }
        if (is_shared(params.fork.scores.mask)) { return hide_keys(bits, scores); }
        #pragma unroll
        for (int r = 0; r < decltype(cute::size<0>(scores))::value; ++r) {
            hide_keys_of_row(Own::bits(slot(n_block), r), r, scores);
        }
    }

    // The tile above the one to visit next. Behind a barrier: all have read the bias of the one before.
    __forceinline__ __device__ int next(const int n_block, const int n_block_min) {
        const int found = seen(n_block - 1, n_block_min, n_block + 1 - params.fork.scores.mask_slots);
        if (found >= n_block_min) { fetch(found); }
        return found + 1;
    }

private:
    // Down from n_block to a tile of which some key is seen; n_block_min - 1 if there is none. Of each
    // query's own mask, tiles from ready up have arrived, and those below may be under way.
    __forceinline__ __device__ int seen(const int n_block, const int n_block_min, const int ready) {
        if (params.fork.scores.mask.ptr == nullptr) { return n_block; }
        if (!is_shared(params.fork.scores.mask)) { return seen_by_some(n_block, n_block_min, ready); }
        uint32_t word;
        const int found = mask.next(params, BlockInfo</*Varlen=*/false>(params, bidb), bidb, bidh, n_block,
            n_block_min, params.seqlen_k, word);
        bits = Keys::votes(word);
        return found;
    }

    __forceinline__ __device__ int seen_by_some(int n_block, const int n_block_min, int ready) {
        for (; n_block >= n_block_min; --n_block) {
            const int last = n_block + 1 - params.fork.scores.mask_slots;
            fetch_own(last, n_block_min);  // where the tile above was
            if (n_block < ready) {
                cute::cp_async_wait<0>();
                __syncwarp();
                ready = last;
            }
            const uint2 sums = Own::summed(slot(n_block));
            bits = __all_sync(0xffffffff, sums.y == 0x01010101) ? Keys::kAll : 0;
            if (__syncthreads_or(sums.x != 0)) { break; }
        }
        return n_block;
    }

    // Where a tile's part of a mask is.
    __forceinline__ __device__ int slot(const int n_block) const {
        const Params &scores = params.fork.scores;
        return scores.stage_at + (scores.bias.ptr == nullptr ? 0 : Bias::kBytes)
            + (n_block & (scores.mask_slots - 1)) * Own::kBytes;
    }

    // The fence after the next keys' copy commits these too, if nobody waits for them before.
    __forceinline__ __device__ void fetch_own(const int n_block, const int n_block_min) const {
        if (n_block < n_block_min) { return; }
        const View &view = params.fork.scores.mask;
        Own::fetch(slot(n_block), row_of<1>(view, bidb, bidh, first_row) + int64_t(n_block) * kBlockN,
            view.row_stride, params.seqlen_q - first_row, params.seqlen_k - n_block * kBlockN);
    }

    __forceinline__ __device__ void fetch(const int n_block) const {
        if (params.fork.scores.bias.ptr == nullptr) { return; }
        Bias::fetch(params.fork.scores.stage_at, bias + int64_t(n_block) * kBlockN * 2,
            params.fork.scores.bias.row_stride * 2, params.seqlen_q - first_row,
            params.seqlen_k - n_block * kBlockN);
    }
};

// A thread block's tiles in the backward pass, from the last queries to the first; as BackwardTiles, for
// calls whose mask, if they have one, all queries share.
template<typename Kernel_traits>
struct SimpleBackwardTiles {
    static constexpr int kBlockM = Kernel_traits::kBlockM, kBlockN = Kernel_traits::kBlockN;
    static constexpr int kWarpsM = Kernel_traits::AtomLayoutMSdP, kWarpsN = Kernel_traits::kNWarps / kWarpsM;
    using Bias = Pieces<BackwardStage<Kernel_traits>>;
    using Keys = Visible<1, kBlockN / kWarpsN / 4>;

    const Flash_bwd_params &params;
    const int n_block;
    const char *const bias;      // of row 0
    uint32_t bits = Keys::kAll;  // of the thread's keys, the same for all rows

    template<typename BlockInfo>
    __forceinline__ __device__ SimpleBackwardTiles(const Flash_bwd_params &params, const BlockInfo &binfo,
        const int bidb, const int bidh, const int n_block)
        : params(params), n_block(n_block), bias(row_of(params.fork.scores.bias, bidb, bidh, 0)) {
        const View &mask = params.fork.scores.mask;
        if (mask.ptr != nullptr) {
            bits = Keys::votes(Keys::load_shared_row(mask, binfo, bidb, bidh, first_key(), params.seqlen_k));
        }
    }

    static __forceinline__ __device__ bool load(int) { return true; }

    __forceinline__ __device__ void fetch(const int m_block) const {
        if (params.fork.scores.bias.ptr == nullptr) { return; }
        const int row = m_block * kBlockM + int(threadIdx.x) / 32 % kWarpsM * 16;
        const int64_t row_stride = params.fork.scores.bias.row_stride * 2;
        Bias::fetch(params.fork.scores.stage_at, bias + row * row_stride + first_key() * 2, row_stride,
            params.seqlen_q - row, params.seqlen_k - first_key());
    }

    template<typename Scores>
    __forceinline__ __device__ void apply(
        Scores &scores, const int m_block, const int m_block_min, bool) const {
        if (params.fork.scores.bias.ptr != nullptr) {
            Bias::template add<typename Kernel_traits::Element>(params.fork.scores, scores);
            __syncwarp();  // its lanes have read the bias
            if (m_block > m_block_min) { fetch(m_block - 1); }
        }
        if (bits != Keys::kAll) { hide_keys(bits, scores); }
    }

private:
    __forceinline__ __device__ int first_key() const {
        return n_block * kBlockN + int(threadIdx.x) / 32 / kWarpsM * (kBlockN / kWarpsN);
    }
};

template<typename Kernel_traits, typename Params, typename BlockInfo>
using BackwardTilesOf = std::conditional_t<Is_simple<Kernel_traits>, SimpleBackwardTiles<Kernel_traits>,
    BackwardTiles<Kernel_traits, Params, BlockInfo>>;

// The shared memory of a launch of flash_fwd_kernel that needs so much besides.
template<typename Kernel_traits>
size_t simple_smem(Flash_fwd_params &params, const size_t besides) {
    if (!kBuilt || !params.fork.scores.any()) { return besides; }
    using Tiles = SimpleForwardTiles<Kernel_traits>;
    params.fork.scores.stage_at = int(besides);
    const size_t with_bias = besides + (params.fork.scores.bias.ptr == nullptr ? 0 : Tiles::Bias::kBytes);
    params.fork.scores.mask_slots =
        is_shared(params.fork.scores.mask) ? 0 : fork_occupancy::mask_slots(with_bias, Tiles::Own::kBytes);
    return with_bias + params.fork.scores.mask_slots * Tiles::Own::kBytes;
}

}  // namespace fork_bias
}  // namespace FLASH_NAMESPACE

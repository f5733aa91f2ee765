// Rows of attn_bias in shared memory: fetched while the tile before is worked on, each warp its own part.
//
// Rows begin at any multiple of an element's size, so what is fetched are the aligned pieces of sixteen bytes
// that hold them, and a thread reads from where its row begins in the first. A piece is fetched up to the
// row's last key, and only if it has one: so each has a byte of the row, and none lies beyond what is
// allotted.

#pragma once

#include <cute/tensor.hpp>

#include "namespace_config.h"
#include "fork_bias.h"
#include "fork_product.h"
#include "fork_runtime.h"

namespace FLASH_NAMESPACE {
namespace fork_bias {

// A warp has kTiles times 16 rows of so many keys; the tiles' first rows are so many rows apart.
template<int kWarps, int kTiles, int kTileStride, int kKeys>
struct Stage {
    static constexpr int kRows = 16;  // of a tile

    static constexpr int pitch(const int size) { return kKeys * size + kPiece; }
    static constexpr int bytes(const int size) { return kWarps * kTiles * kRows * pitch(size); }

    // The warp's part, which begins there: so many rows on from its first, and keys. The copies belong to the
    // next group that the caller commits; all lanes must have read what was there.
    static __forceinline__ __device__ void fetch(
        const Params &params, const char *first, const int rows, const int keys) {
        if (params.bias_is_float) {
            fetch<4>(params, first, rows, keys);
        } else {
            fetch<2>(params, first, rows, keys);
        }
    }

    // Adds the thread's part to its scores. What begins there in memory is the warp's part.
    template<typename Element, typename Scores>
    static __forceinline__ __device__ void add(const Params &params, const char *first, Scores &scores) {
        constexpr int kOwnKeys = decltype(cute::size<1>(scores))::value,
                      kGroup = kOwnKeys < 16 ? kOwnKeys : 16;
        static_assert(decltype(cute::size<0>(scores))::value == 2 * kTiles && kOwnKeys == kKeys / 4);
        #pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            if (params.bias_is_float) {
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    add_row(params, row<float>(params, first, tile, half), tile * 2 + half, scores);
                }
            } else {
                #pragma unroll
                for (int c = 0; c < kOwnKeys; c += kGroup) {
                    uint32_t words[kGroup];
                    load(params, first, tile, c, words);
                    Product<Element>::add(params, words, tile * 2, c, scores);
                }
            }
        }
    }

private:
    // Where a thread's first element of a row is.
    template<typename Value>
    static __forceinline__ __device__ const char *row(
        const Params &params, const char *first, const int tile, const int half) {
        constexpr int kSize = sizeof(Value);
        const int row = tile * kRows + half * 8 + threadIdx.x % 32 / 4,
                  row_in_memory = row + tile * (kTileStride - kRows);
        return own(params, kSize) + row * pitch(kSize)
            + aligned(first + row_in_memory * params.bias.row_stride * kSize) + threadIdx.x % 4 * 2 * kSize;
    }

    template<typename Scores>
    static __forceinline__ __device__ void add_row(
        const Params &params, const char *at, const int r, Scores &scores) {
        #pragma unroll
        for (int c = 0; c < kKeys / 4; c += 2) {
            const float *pair = reinterpret_cast<const float *>(at + c * 16);
            scores(r, c) = fused(finite(pair[0]), params.inverse_scale, scores(r, c));
            scores(r, c + 1) = fused(finite(pair[1]), params.inverse_scale, scores(r, c + 1));
        }
    }

    // A tile's elements from a thread's key c on, as Product has them.
    template<int kWords>
    static __forceinline__ __device__ void load(
        const Params &params, const char *first, const int tile, const int c, uint32_t (&words)[kWords]) {
        static_assert(kWords % 4 == 0);
        if (params.bias_in_pieces) {
            const int lane = threadIdx.x % 32;
            const uint32_t at = cute::cast_smem_ptr_to_uint(
                own(params, 2) + (tile * kRows + lane % 16) * pitch(2) + lane / 16 * kPiece);
            #pragma unroll
            for (int i = 0; i < kWords; i += 4) {
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                    : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3])
                    : "r"(at + (c + i) / 2 * kPiece)
                    : "memory");
            }
            return;
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const char *at = row<uint16_t>(params, first, tile, half) + c / 2 * kPiece;
            const int odd = reinterpret_cast<uintptr_t>(at) % 4;
            #pragma unroll
            for (int i = half; i < kWords; i += 2) {
                const uint32_t *around = reinterpret_cast<const uint32_t *>(at - odd + i / 2 * kPiece);
                words[i] = __byte_perm(around[0], around[1], odd ? 0x5432 : 0x3210);
            }
        }
    }

    static __forceinline__ __device__ int aligned(const char *row) {
        return int(reinterpret_cast<uintptr_t>(row) % kPiece);
    }

    static __forceinline__ __device__ char *own(const Params &params, const int size) {
        extern __shared__ char smem_[];
        return smem_ + params.stage_at + int(threadIdx.x) / 32 * kTiles * kRows * pitch(size);
    }

    template<int kSize>
    static __forceinline__ __device__ void fetch(
        const Params &params, const char *first, const int rows, const int keys) {
        constexpr int kPieces = kKeys * kSize / kPiece, kAtOnce = 32 / kPieces;
        static_assert(kPieces * kAtOnce == 32 && kAtOnce <= kRows);
        const int lane = threadIdx.x % 32;
        const int64_t stride = params.bias.row_stride * kSize;
        if (params.bias_in_pieces && rows >= (kTiles - 1) * kTileStride + kRows && keys == kKeys) {
            const uint32_t to = cute::cast_smem_ptr_to_uint(
                own(params, kSize) + lane / kPieces * pitch(kSize) + lane % kPieces * kPiece);
            #pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const char *from =
                    first + (tile * kTileStride + lane / kPieces) * stride + lane % kPieces * kPiece;
                #pragma unroll
                for (int i = 0; i < kRows; i += kAtOnce) {
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                     to + (tile * kRows + i) * pitch(kSize)),
                        "l"(from)
                        : "memory");
                    from += kAtOnce * stride;
                }
            }
            return;
        }
        #pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            char *to = own(params, kSize) + tile * kRows * pitch(kSize);
            const char *tile_first = first + tile * kTileStride * stride;
            const int tile_rows = min(rows - tile * kTileStride, kRows);
            const char *row = tile_first + lane / kPieces * stride;
            #pragma unroll 1
            for (int i = 0; i < kRows; i += kAtOnce) {
                copy(to + (i + lane / kPieces) * pitch(kSize), row, lane % kPieces,
                    i + lane / kPieces < tile_rows ? keys * kSize : -kPiece);
                row += kAtOnce * stride;
            }
            // A row that does not begin with a piece ends in one more.
            copy(to + lane * pitch(kSize), tile_first + lane * stride, kPieces,
                lane < tile_rows ? keys * kSize : -kPiece);
        }
    }

    // A branch a copy costs more than the copy.
    static __forceinline__ __device__ void copy(char *to, const char *row, const int piece, const int size) {
        const int begin = piece * kPiece - aligned(row);
        asm volatile(
            "{\n"
            ".reg .pred exists;\n"
            "setp.gt.s32 exists, %2, 0;\n"
            "@exists cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
            "}\n" ::"r"(cute::cast_smem_ptr_to_uint(to + piece * kPiece)),
            "l"(row + begin), "r"(min(size - begin, kPiece))
            : "memory");
    }

    // As fork_tile.h's add_float has them: the same bits.
    static __forceinline__ __device__ float finite(const float bias) {
        float result;
        asm("{\n"
            ".reg .pred hides;\n"
            "setp.eq.f32 hides, %1, 0fFF800000;\n"
            "max.NaN.f32 %0, %1, %2;\n"
            "min.NaN.f32 %0, %0, %3;\n"
            "selp.f32 %0, %1, %0, hides;\n"
            "}\n"
            : "=&f"(result)
            : "f"(bias), "f"(-kMostBias), "f"(kMostBias));
        return result;
    }

    static __forceinline__ __device__ float fused(const float x, const float y, const float z) {
        float result;
        asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(x), "f"(y), "f"(z));
        return result;
    }
};

template<typename Kernel_traits>
using ForwardStage = Stage<Kernel_traits::kNWarps, Kernel_traits::kBlockM / (16 * Kernel_traits::kNWarps),
    16 * Kernel_traits::kNWarps, Kernel_traits::kBlockN>;
template<typename Kernel_traits>
using BackwardStage = Stage<Kernel_traits::kNWarps,
    Kernel_traits::kBlockM / (16 * Kernel_traits::AtomLayoutMSdP), 16 * Kernel_traits::AtomLayoutMSdP,
    Kernel_traits::kBlockN / (Kernel_traits::kNWarps / Kernel_traits::AtomLayoutMSdP)>;

// What follows is the host's.
inline int shared_memory_of_device() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Whether rows are staged, and the shared memory of a launch that needs so much besides. Keys must follow
// each other. If there is not enough, threads read the bias from memory.
template<typename Staged, typename CallParams>
size_t stage(CallParams &params, const size_t besides) {
    Params &scores = params.fork.scores;
    scores.stage_at = 0;
    if (!kBuilt || scores.bias.ptr == nullptr || (scores.bias.key_stride != 1 && params.seqlen_k > 1)) {
        return besides;
    }
    const size_t size = besides + Staged::bytes(scores.bias_is_float ? 4 : 2);
    if (size > size_t(shared_memory_of_device())) { return besides; }
    scores.stage_at = int(besides);
    scores.bias_in_pieces = in_pieces(scores.bias, scores.bias_is_float ? 4 : 2, params.seqlen_k);
    return size;
}

// What a launch may ask for; the limit of kernels of other calls is another.
template<typename CallParams>
int limit(const CallParams &params, const int other) {
    return params.fork.scores.any() ? shared_memory_of_device() : other;
}

}  // namespace fork_bias
}  // namespace FLASH_NAMESPACE

// attn_bias of the queries' type, added to scores as a matrix product: a row's elements times a diagonal of
// inverse_scale.
//
// One mma adds eight keys of sixteen rows, for which a thread alone would convert four elements and add four
// products. To a score the diagonal's zeros add zeros if the elements that they meet are finite, so what is
// not is made finite before, and has its effect after. Whichever way the elements come here, the same
// products are added in the same order: the same bits. That a product of zero leaves all bits of a sum,
// however large the other factor, PTX does not promise: tests/wheel/test_bias.py asks.

#pragma once

#include <cute/tensor.hpp>

#include "namespace_config.h"
#include "fork_bias.h"

// Scores plus rows times a diagonal; the larger of sizes; what is finite next to a word: for a type or a pair
// of it
#define FORK_MMA(TYPE) \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." TYPE "." TYPE \
                 ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
        : "+f"(scores(r, c)), "+f"(scores(r, c + 1)), "+f"(scores(r + 1, c)), "+f"(scores(r + 1, c + 1)) \
        : "r"(upper), "r"(lower), "r"(diagonal))

#define FORK_LARGER(TYPE) \
    asm("{\n.reg .b32 own;\nabs." TYPE " own, %1;\nmax.NaN." TYPE " %0, %0, own;\n}\n" \
        : "+r"(size) \
        : "r"(word))

#define FORK_MADE_FINITE(TYPE) \
    asm("max." TYPE " %0, %0, %1;\nmin." TYPE " %0, %0, %2;" \
        : "+&r"(word) \
        : "r"((0x8000 | kMost) * 0x10001), "r"(kMost * 0x10001))

namespace FLASH_NAMESPACE {
namespace fork_bias {

template<typename Element>
struct Product {
    static constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
    // The largest that half_t has, or of bfloat16_t what is next below
    static constexpr uint32_t kMost = kIsBf16 ? 0x477f : 0x7bff;

    // Adds so many words of two elements to the scores from row r and key c of a thread on: of each eight
    // keys a word of the row, and one of the row eight rows on. All lanes of a warp must come.
    template<int kWords, typename Scores>
    static __forceinline__ __device__ void add(
        const Params &params, const uint32_t (&words)[kWords], const int r, const int c, Scores &scores) {
        static_assert(kWords % 2 == 0);
        uint32_t largest = 0;
        #pragma unroll
        for (int i = 0; i < kWords; ++i) { largest = larger(largest, words[i]); }
        // Carries into the sign of an element that is larger than kMost, or no number.
        const bool finite =
            !__any_sync(0xffffffff, ((largest + (0x7fff - kMost) * 0x10001) & 0x80008000) != 0);
        const uint32_t diagonal = diagonal_of(params.inverse_terms[0]),
                       rest = diagonal_of(params.inverse_terms[1]);
        if (__builtin_expect(finite, 1)) {  // else what is rare lies in the way
            #pragma unroll
            for (int i = 0; i < kWords; i += 2) {
                add_product(words[i], words[i + 1], diagonal, r, c + i, scores);
            }
            if (__builtin_expect(params.inverse_terms[1] == 0, 1)) { return; }
            #pragma unroll
            for (int i = 0; i < kWords; i += 2) {
                add_product(words[i], words[i + 1], rest, r, c + i, scores);
            }
            return;
        }
        #pragma unroll
        for (int i = 0; i < kWords; i += 2) {
            const uint32_t upper = made_finite(words[i]), lower = made_finite(words[i + 1]);
            add_product(upper, lower, diagonal, r, c + i, scores);
            if (params.inverse_terms[1] != 0) { add_product(upper, lower, rest, r, c + i, scores); }
            #pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                hide_or_spoil(words[i], odd, scores(r, c + i + odd));
                hide_or_spoil(words[i + 1], odd, scores(r + 1, c + i + odd));
            }
        }
    }

private:
    template<typename Scores>
    static __forceinline__ __device__ void add_product(const uint32_t upper, const uint32_t lower,
        const uint32_t diagonal, const int r, const int c, Scores &scores) {
        if constexpr (kIsBf16) {
            FORK_MMA("bf16");
        } else {
            FORK_MMA("f16");
        }
    }

    // A thread's two elements of the diagonal matrix: rows from twice its place in a group of four lanes on,
    // column by group.
    static __forceinline__ __device__ uint32_t diagonal_of(const uint32_t term) {
        const int lane = threadIdx.x % 32, row = lane % 4 * 2, column = lane / 4;
        return row == column ? term : row + 1 == column ? term << 16 : 0;
    }

    // Of the sizes of two elements each; NaN if any is.
    static __forceinline__ __device__ uint32_t larger(uint32_t size, const uint32_t word) {
        if constexpr (kIsBf16) {
            FORK_LARGER("bf16x2");
        } else {
            FORK_LARGER("f16x2");
        }
        return size;
    }

    static __forceinline__ __device__ uint32_t made_finite(uint32_t word) {
        if constexpr (kIsBf16) {
            FORK_MADE_FINITE("bf16x2");
        } else {
            FORK_MADE_FINITE("f16x2");
        }
        return word;
    }

    // What -inf and NaN do to a score.
    static __forceinline__ __device__ void hide_or_spoil(const uint32_t word, const int odd, float &score) {
        const float bias = float(reinterpret_cast<const Element *>(&word)[odd]);
        score = bias > -INFINITY ? score : bias;
    }
};

}  // namespace fork_bias
}  // namespace FLASH_NAMESPACE

#undef FORK_MMA
#undef FORK_LARGER
#undef FORK_MADE_FINITE

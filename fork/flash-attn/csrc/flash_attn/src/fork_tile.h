// attn_mask and attn_bias in a tile of scores, read in place.
//
// Any strides will do, 0 included, and any alignment: nothing is copied or padded in memory. A tile of scores
// that the mask hides from every row is not visited. That changes no bit where values are finite: hidden
// scores are -inf, which leave the maximum, the sum and the accumulator of the online softmax as they are.

#pragma once

#include <cute/tensor.hpp>

#include "namespace_config.h"
#include "fork_bias.h"
#include "fork_fold.h"
#include "fork_stage.h"
#include "utils.h"

namespace FLASH_NAMESPACE {
namespace fork_bias {

// The rows and keys of a tile that a thread holds, as Mask::apply_mask has them: rows (2, MMA_M), keys (2,
// MMA_N).
struct ThreadTile {
    int row, warp_row_stride;

    __forceinline__ __device__ int row_of(const int r) const {
        return row + r / 2 * warp_row_stride + r % 2 * 8;
    }
    static __forceinline__ __device__ int key_of(const int first_key, const int c) {
        return first_key + int(threadIdx.x) % 4 * 2 + c / 2 * 8 + c % 2;
    }
};

// Where the rows of a sequence and a head begin; elements of so many bytes.
template<typename Byte, typename BlockInfo>
__forceinline__ __device__ const Byte *slice(
    const View &view, const BlockInfo &binfo, const int bidb, const int bidh, const int size = 1) {
    return static_cast<const Byte *>(view.ptr)
        + (bidb * view.batch_stride + bidh / view.heads_per_slice * view.head_stride
              + (binfo.sum_s_q == -1 ? 0 : binfo.sum_s_q) * view.row_stride)
        * size;
}

// Loads are spelled out: a branch an element, as C++ has it, takes the compiler minutes a kernel.
//
// Adds the bias, a float, to a score whose bit is set. Finite values count as at most what half_t has, which
// hides as well as any: where scores are larger, exp2 of a score less the row's maximum, each of them
// rounded, overflows. -inf and NaN stay what they are.
__forceinline__ __device__ void add_float(
    float &score, const uint32_t bits, const uint32_t bit, const void *bias, const float inverse_scale) {
    asm("{\n"
        ".reg .pred visible, hides;\n"
        ".reg .b32 value;\n"
        ".reg .f32 summand, finite;\n"
        "and.b32 value, %1, %2;\n"
        "setp.ne.s32 visible, value, 0;\n"
        "mov.f32 summand, 0f00000000;\n"
        "@visible ld.global.f32 summand, [%3];\n"
        "setp.eq.f32 hides, summand, 0fFF800000;\n"
        "max.NaN.f32 finite, summand, %5;\n"
        "min.NaN.f32 finite, finite, %6;\n"
        "selp.f32 summand, summand, finite, hides;\n"
        "fma.rn.f32 %0, summand, %4, %0;\n"
        "}\n"
        : "+f"(score)
        : "r"(bits), "r"(bit), "l"(bias), "f"(inverse_scale), "f"(-kMostBias), "f"(kMostBias));
}

// Two bytes where the bit is set, else 0.
__forceinline__ __device__ uint32_t load_element(const uint32_t bits, const uint32_t bit, const void *at) {
    uint32_t element;
    asm("{\n"
        ".reg .pred visible;\n"
        ".reg .b32 own;\n"
        ".reg .b16 short;\n"
        "and.b32 own, %1, %2;\n"
        "setp.ne.s32 visible, own, 0;\n"
        "mov.b16 short, 0;\n"
        "@visible ld.global.b16 short, [%3];\n"
        "cvt.u32.u16 %0, short;\n"
        "}\n"
        : "=r"(element)
        : "r"(bits), "r"(bit), "l"(at));
    return element;
}

// Writes an element of the gradient where the bit is set: a float, else half_t or bfloat16_t.
template<typename Element>
__forceinline__ __device__ void store_gradient(
    const uint32_t bits, const uint32_t bit, void *at, const float value, const bool is_float) {
    const Element rounded(value);
    asm volatile(
        "{\n"
        ".reg .pred visible, full, half;\n"
        ".reg .b32 own;\n"
        "and.b32 own, %0, %1;\n"
        "setp.ne.s32 visible, own, 0;\n"
        "setp.ne.and.s32 full, %5, 0, visible;\n"
        "setp.eq.and.s32 half, %5, 0, visible;\n"
        "@full st.global.f32 [%2], %3;\n"
        "@half st.global.b16 [%2], %4;\n"
        "}\n" ::"r"(bits),
        "r"(bit), "l"(at), "f"(value), "h"(reinterpret_cast<const uint16_t &>(rounded)), "r"(int(is_float))
        : "memory");
}

// Four keys of a row of the mask, a byte each, from the one that lies there on; as many as there are, and 0
// for the others. Words: whether they lie in an aligned one.
__forceinline__ __device__ uint32_t load_mask(
    const uint8_t *mask, const int64_t key_stride, const int keys, const bool words) {
    uint32_t word;
    if (words && (keys >= 4 || keys <= 0)) {
        asm("{\n"
            ".reg .pred exists;\n"
            "setp.gt.s32 exists, %2, 0;\n"
            "mov.b32 %0, 0;\n"
            "@exists ld.global.b32 %0, [%1];\n"
            "}\n"
            : "=&r"(word)
            : "l"(mask), "r"(keys));
    } else {
        asm("{\n"
            ".reg .pred exists;\n"
            ".reg .b32 a, b, c, d;\n"
            ".reg .b64 at;\n"
            "mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0;\n"
            "setp.gt.s32 exists, %2, 0;\n"
            "@exists ld.global.u8 a, [%1];\n"
            "add.s64 at, %1, %3;\n"
            "setp.gt.s32 exists, %2, 1;\n"
            "@exists ld.global.u8 b, [at];\n"
            "add.s64 at, at, %3;\n"
            "setp.gt.s32 exists, %2, 2;\n"
            "@exists ld.global.u8 c, [at];\n"
            "add.s64 at, at, %3;\n"
            "setp.gt.s32 exists, %2, 3;\n"
            "@exists ld.global.u8 d, [at];\n"
            "shl.b32 b, b, 8; shl.b32 c, c, 16; shl.b32 d, d, 24;\n"
            "or.b32 a, a, b; or.b32 c, c, d;\n"
            "or.b32 %0, a, c;\n"
            "}\n"
            : "=r"(word)
            : "l"(mask), "r"(keys), "l"(key_stride));
    }
    return word;
}

// Eight keys of a row of the mask, from an aligned one on, if the row exists; else zeros.
__forceinline__ __device__ uint2 load_octet(const uint8_t *mask, const bool exists) {
    uint2 octet;
    asm("{\n"
        ".reg .pred exists;\n"
        "setp.ne.s32 exists, %3, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "@exists ld.global.v2.b32 {%0, %1}, [%2];\n"
        "}\n"
        : "=&r"(octet.x), "=&r"(octet.y)
        : "l"(mask), "r"(int(exists)));
    return octet;
}

// The four bytes that are not 0 as bits before the others.
__forceinline__ __device__ uint32_t pack_bytes(const uint32_t others, const uint32_t word) {
    const uint32_t nonzero = (((word & 0x7f7f7f7f) + 0x7f7f7f7f) | word) & 0x80808080;
    return __funnelshift_l(nonzero * 0x204081, others, 4);  // the product has them in its upper four bits
}

// Which scores of a thread's part of a tile count, a bit each: by the mask, and by what a row may see of the
// keys. A thread has two of every eight keys of its rows.
template<int kRows, int kKeys>
struct Visible {
    static_assert(kKeys <= 32);
    static constexpr uint32_t kAll = kKeys == 32 ? 0xffffffffu : (1u << kKeys % 32) - 1;
    // Of loads behind one branch: all of a tile's at once would not fit the registers
    static constexpr int kGroup = kKeys < 8 ? kKeys : 8;
    uint32_t bits[kRows];

    // The bits of the thread's first keys, as many as lie less than so many keys behind its first.
    static __forceinline__ __device__ uint32_t before(const int keys) {
        const int count = keys > 0 ? min(keys / 8 * 2 + min(keys % 8, 2), 32) : 0;
        return count == 32 ? 0xffffffffu : (1u << count) - 1;
    }

    // Whether any of them counts.
    template<typename CallParams, typename BlockInfo>
    __forceinline__ __device__ bool load(const CallParams &params, const BlockInfo &binfo, const int bidb,
        const int bidh, const ThreadTile thread_tile, const int first_key, const int num_keys) {
        #pragma unroll
        for (int r = 0; r < kRows; ++r) { bits[r] = kAll; }
        if (params.fork.scores.mask.ptr != nullptr) {
            load_mask_rows(params.fork.scores.mask, binfo, bidb, bidh, thread_tile, first_key, num_keys);
        }
        return limit(params, binfo, thread_tile, first_key, num_keys);
    }

    // Leaves out what a row may not see; whether anything is left.
    template<typename CallParams, typename BlockInfo>
    __forceinline__ __device__ bool limit(const CallParams &params, const BlockInfo &binfo,
        const ThreadTile thread_tile, const int first_key, const int num_keys) {
        const int own_first = ThreadTile::key_of(first_key, 0), last_row = thread_tile.row_of(kRows - 1);
        uint32_t any = 0;
        // Of all rows, the first has the first end, and the last the last beginning.
        if (first_key + kKeys * 4
                <= min(num_keys, fork_fold::visible_keys(params, binfo, thread_tile.row).end)
            && last_row < binfo.actual_seqlen_q
            && fork_fold::visible_keys(params, binfo, last_row).begin <= first_key) {
            #pragma unroll
            for (int r = 0; r < kRows; ++r) { any |= bits[r]; }
            return any != 0;
        }
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = thread_tile.row_of(r);
            const fork_fold::Keys keys = fork_fold::visible_keys(params, binfo, row);
            const int end = row < binfo.actual_seqlen_q ? min(num_keys, keys.end) - own_first : 0;
            bits[r] &= before(end) & ~before(keys.begin - own_first);
            any |= bits[r];
        }
        return any != 0;
    }

    // Adds the bias to the scores that count, where it cannot be staged: out of the way, where it takes no
    // registers from others. On that way scores have the layout of their registers, or all kernels move
    // theirs for it.
    template<typename Element, typename BlockInfo, typename Tensor>
    __forceinline__ __device__ void add_in_place(const Params &params, const BlockInfo &binfo, const int bidb,
        const int bidh, const ThreadTile thread_tile, const int first_key, Tensor &scores) const {
        static_assert(decltype(cute::size<0>(scores))::value == kRows
            && decltype(cute::size<1>(scores))::value == kKeys);
        float own[kRows * kKeys];
        auto copy = cute::make_tensor(&own[0], scores.layout());
        #pragma unroll
        for (int i = 0; i < kRows * kKeys; ++i) { copy(i) = scores(i); }
        add<Element>(*this, params, binfo, bidb, bidh, thread_tile, first_key, own, scores.layout());
        #pragma unroll
        for (int i = 0; i < kRows * kKeys; ++i) { scores(i) = copy(i); }
    }

    // The scores that do not count become -inf.
    template<typename Tensor>
    __forceinline__ __device__ void hide(Tensor &scores) const {
        #pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if ((bits[r] & kAll) == kAll) { continue; }
            #pragma unroll
            for (int c = 0; c < kKeys; ++c) {
                if (!(bits[r] & 1u << c)) { scores(r, c) = -INFINITY; }
            }
        }
    }

    // All rows have the same keys: those that the lanes loaded.
    __forceinline__ __device__ void set_shared_row(const uint32_t word) {
        const uint32_t row = votes(word);
        #pragma unroll
        for (int r = 0; r < kRows; ++r) { bits[r] = row; }
    }

    // What set_shared_row() wants, of the tile from a key on; nothing if num_keys is negative.
    template<typename BlockInfo>
    static __forceinline__ __device__ uint32_t load_shared_row(const View &view, const BlockInfo &binfo,
        const int bidb, const int bidh, const int first_key, const int num_keys) {
        const int lane = threadIdx.x % 32, key = first_key + lane * 4;
        const uint8_t *first = slice<uint8_t>(view, binfo, bidb, bidh) + key * view.key_stride;
        return load_mask(first, view.key_stride, lane < kKeys && num_keys >= 0 ? num_keys - key : 0,
            view.key_stride == 1 && reinterpret_cast<uintptr_t>(first) % 4 == 0);
    }

    // The bits of the thread's keys, of those that the lanes loaded.
    static __forceinline__ __device__ uint32_t votes(const uint32_t word) {
        const auto vote = [&](const int key) {
            return __ballot_sync(0xffffffff, (word & 0xffu << key * 8) != 0);
        };
        const uint32_t keys[4] = {vote(0), vote(1), vote(2), vote(3)};
        const uint32_t even = threadIdx.x % 2 ? keys[2] : keys[0], odd = threadIdx.x % 2 ? keys[3] : keys[1];
        const int lane = threadIdx.x % 4 / 2;
        return (even >> lane & 0x55555555u) | (odd >> lane & 0x55555555u) << 1;
    }

    // The bits of the thread's keys of a row, of which each of the row's four threads has every fourth octet.
    // Each packs its own, and then takes its two keys of each octet from who has it.
    static __forceinline__ __device__ uint32_t of_octets(const uint2 (&octets)[kKeys < 8 ? 1 : kKeys / 8]) {
        const int pair = threadIdx.x % 4 * 2;
        uint32_t packed = 0, bits = 0;
        #pragma unroll
        for (int i = kKeys / 8 - 1; i >= 0; --i) {
            packed = pack_bytes(pack_bytes(packed, octets[i].y), octets[i].x);
        }
        #pragma unroll
        for (int from = 0; from < 4; ++from) {
            bits |= (__shfl_sync(0xffffffff, packed, from, 4) >> pair & 0x03030303) << from * 2;
        }
        return bits;
    }

private:
    // As Stage adds it: the same bits.
    template<typename Element, typename BlockInfo, typename Layout>
    static __noinline__ __device__ void add(const Visible visible, const Params &params,
        const BlockInfo binfo, const int bidb, const int bidh, const ThreadTile thread_tile,
        const int first_key, float *own, const Layout layout) {
        // Of 128 rows, else ptxas spills 2 KB in the kernel that calls
        constexpr int kAtOnce = kRows * kKeys > 64 ? kKeys : 1;
        auto scores = cute::make_tensor(own, layout);
        const int size = params.bias_is_float ? 4 : 2;
        const int64_t row_stride = params.bias.row_stride * size, key_stride = params.bias.key_stride * size;
        const char *first =
            slice<char>(params.bias, binfo, bidb, bidh, size) + ThreadTile::key_of(first_key, 0) * key_stride;
        #pragma unroll(kAtOnce)
        for (int r = 0; r < kRows; r += 2) {
            #pragma unroll(kAtOnce)
            for (int c = 0; c < kKeys; c += kGroup) {
                const uint32_t bits[2] = {visible.bits[r] >> c, visible.bits[r + 1] >> c};
                if (!__any_sync(0xffffffff, ((bits[0] | bits[1]) & ((1u << kGroup) - 1)) != 0)) { continue; }
                uint32_t words[kGroup];
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const char *at = first + thread_tile.row_of(r + half) * row_stride + c * 4 * key_stride;
                    #pragma unroll
                    for (int i = 0; i < kGroup; i += 2) {
                        if (params.bias_is_float) {
                            add_float(scores(r + half, c + i), bits[half], 1u << i, at, params.inverse_scale);
                            add_float(scores(r + half, c + i + 1), bits[half], 2u << i, at + key_stride,
                                params.inverse_scale);
                        } else {
                            words[i + half] = load_element(bits[half], 1u << i, at)
                                | load_element(bits[half], 2u << i, at + key_stride) << 16;
                        }
                        at += 8 * key_stride;
                    }
                }
                if (!params.bias_is_float) { Product<Element>::add(params, words, r, c, scores); }
            }
        }
    }

    // If keys do not lie in aligned octets, or not all exist, a warp loads a row at a time, lane l four keys
    // from 4 * l on, and votes on each of the four: the votes of all lanes have a bit for each of the row's
    // keys, of which a thread takes its own.
    template<typename BlockInfo>
    __forceinline__ __device__ void load_mask_rows(const View &view, const BlockInfo &binfo, const int bidb,
        const int bidh, const ThreadTile thread_tile, const int first_key, const int num_keys) {
        const int lane = threadIdx.x % 32, key = first_key + lane * 4,
                  keys = lane < kKeys ? num_keys - key : 0;
        const uint8_t *first = slice<uint8_t>(view, binfo, bidb, bidh) + key * view.key_stride;
        const bool in_words =
            view.key_stride == 1 && view.row_stride % 4 == 0 && reinterpret_cast<uintptr_t>(first) % 4 == 0;
        if (view.row_stride == 0) {
            return set_shared_row(load_mask(first, view.key_stride, keys, in_words));
        }
        if constexpr (kKeys % 8 == 0) {
            const uint8_t *own = slice<uint8_t>(view, binfo, bidb, bidh) + first_key + lane % 4 * 8;
            if (view.key_stride == 1 && first_key + kKeys * 4 <= num_keys
                && ((uintptr_t(view.row_stride) | reinterpret_cast<uintptr_t>(own)) % 8) == 0) {
                return load_octets(own, view.row_stride, thread_tile, binfo.actual_seqlen_q);
            }
        }
        #pragma unroll
        for (int group = 0; group < kRows / 2; ++group) {
            const int first_row = thread_tile.row - lane / 4 + group * thread_tile.warp_row_stride;
            #pragma unroll 1
            for (int i = 0; i < 16; i += 4) {
                uint32_t words[4];
                #pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int row = first_row + i + j;
                    words[j] = load_mask(first + row * view.row_stride, view.key_stride,
                        row < binfo.actual_seqlen_q ? keys : 0, in_words);
                }
                #pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint32_t row = votes(words[j]);
                    if (lane / 4 == i + j) { bits[group * 2] = row; }
                    if (lane / 4 + 8 == i + j) { bits[group * 2 + 1] = row; }
                }
            }
        }
    }

    __forceinline__ __device__ void load_octets(
        const uint8_t *own, const int64_t row_stride, const ThreadTile thread_tile, const int end_row) {
        constexpr int kAtOnce = 2;  // rows: more would not fit the registers of kernels with 128
        #pragma unroll 1
        for (int r = 0; r < kRows; r += kAtOnce) {
            uint2 octets[kAtOnce][kKeys / 8];
            #pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int row = thread_tile.row_of(r + j);
                #pragma unroll
                for (int i = 0; i < kKeys / 8; ++i) {
                    octets[j][i] = load_octet(own + row * row_stride + i * 32, row < end_row);
                }
            }
            #pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const uint32_t found = of_octets(octets[j]);
                #pragma unroll
                for (int to = j; to < kRows; to += kAtOnce) { bits[to] = to == r + j ? found : bits[to]; }
            }
        }
    }
};

// Keys past the longest length that the call named have no place in a mask or a bias.
template<typename Params, typename BlockInfo>
__forceinline__ __device__ int num_keys(const Params &params, const BlockInfo &binfo) {
    return min(binfo.actual_seqlen_k, params.seqlen_k);
}

// The tiles that a mask leaves which all queries share. All warps load the same keys, of a few tiles at once:
// nobody need ask the others.
template<int kBlockN>
struct SharedMask {
    static constexpr int kAhead = 4;
    uint32_t ahead[kAhead];  // keys of the tiles from there down
    int ahead_from = -1;

    // Down from n_block to a tile of which some key is seen, and the lane's part of its keys; n_block_min - 1
    // and 0 if there is none.
    template<typename Params, typename BlockInfo>
    __forceinline__ __device__ int next(const Params &params, const BlockInfo &binfo, const int bidb,
        const int bidh, int n_block, const int n_block_min, const int num_keys, uint32_t &word) {
        for (; n_block >= n_block_min; --n_block) {
            const int at = ahead_from - n_block;
            if (at < 0 || at >= kAhead) {
                load_ahead(params, binfo, bidb, bidh, n_block, n_block_min, num_keys);
            }
            word = ahead[0];
            #pragma unroll
            for (int i = 1; i < kAhead; ++i) { word = ahead_from - n_block == i ? ahead[i] : word; }
            if (!__any_sync(0xffffffff, word != 0)) { continue; }
            // So early that nobody waits for them, if the next tile is one of them.
            if (ahead_from - n_block == kAhead - 1) {
                load_ahead(params, binfo, bidb, bidh, n_block - 1, n_block_min, num_keys);
            }
            return n_block;
        }
        word = 0;
        return n_block;
    }

private:
    template<typename Params, typename BlockInfo>
    __forceinline__ __device__ void load_ahead(const Params &params, const BlockInfo &binfo, const int bidb,
        const int bidh, const int n_block, const int n_block_min, const int num_keys) {
        #pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            ahead[i] = Visible<1, kBlockN / 4>::load_shared_row(params.fork.scores.mask, binfo, bidb, bidh,
                (n_block - i) * kBlockN, n_block - i < n_block_min ? -1 : num_keys);
        }
        ahead_from = n_block;
    }
};

// How the forward kernel goes through the tiles of its rows, from the last to the first.
template<typename Kernel_traits, typename Params, typename BlockInfo>
struct ForwardTiles {
    static constexpr int kBlockN = Kernel_traits::kBlockN,
                         kRows = 2 * Kernel_traits::kBlockM / (16 * Kernel_traits::kNWarps);

    const Params &params;
    const BlockInfo &binfo;
    const int bidb, bidh;
    const ThreadTile thread_tile;
    const char *const bias;  // the warp's first row
    Visible<kRows, kBlockN / 4> visible;
    SharedMask<kBlockN> shared;

    __forceinline__ __device__ ForwardTiles(
        const Params &params, const BlockInfo &binfo, const int bidb, const int bidh, const int m_block)
        : params(params),
          binfo(binfo),
          bidb(bidb),
          bidh(bidh),
          thread_tile{
              m_block * Kernel_traits::kBlockM + int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4,
              Kernel_traits::kNWarps * 16},
          bias(slice<char>(
                   params.fork.scores.bias, binfo, bidb, bidh, params.fork.scores.bias_is_float ? 4 : 2)
              + first_row() * params.fork.scores.bias.row_stride
                  * (params.fork.scores.bias_is_float ? 4 : 2)) {}

    // The tile to begin with: n_block, or the next below in which some row sees a key, or the last.
    template<typename Tensor>
    __forceinline__ __device__ int begin(
        const int n_block, const int n_block_min, Tensor &tKgK, Tensor &tVgV, const int *block_table) {
        const int first = max(next(n_block, n_block_min), n_block_min);
        advance(n_block, first, tKgK, tVgV, block_table);
        fetch(first, n_block_min);
        return first;
    }

    // Applies mask and bias to the scores of a tile, and goes on to the tile above the one to visit next.
    template<typename Scores, typename Tensor>
    __forceinline__ __device__ int apply(Scores &acc_s, const int n_block, const int n_block_min,
        Tensor &tKgK, Tensor &tVgV, const int *block_table) {
        auto scores =
            cute::make_tensor(acc_s.data(), FLASH_NAMESPACE::convert_layout_acc_rowcol(acc_s.layout()));
        if (params.fork.scores.bias.ptr == nullptr) {
        } else if (params.fork.scores.stage_at == 0) {
            visible.template add_in_place<typename Kernel_traits::Element>(
                params.fork.scores, binfo, bidb, bidh, thread_tile, n_block * kBlockN, scores);
        } else {
            ForwardStage<Kernel_traits>::template add<typename Kernel_traits::Element>(
                params.fork.scores, bias, scores);
        }
        visible.hide(scores);
        const int above = next(n_block - 1, n_block_min) + 1;
        advance(n_block, above, tKgK, tVgV, block_table);
        __syncwarp();  // its lanes have read the bias
        fetch(above - 1, n_block_min);
        return above;
    }

private:
    __forceinline__ __device__ int first_row() const { return thread_tile.row - int(threadIdx.x) % 32 / 4; }

    // Down from n_block, whatever its tiles' mask, to one in which some row sees a key; n_block_min - 1 if
    // there is none.
    __forceinline__ __device__ int next(int n_block, const int n_block_min) {
        const View &mask = params.fork.scores.mask;
        const int keys = num_keys(params, binfo);
        if (mask.ptr != nullptr && mask.row_stride == 0) {
            uint32_t word;
            n_block = shared.next(params, binfo, bidb, bidh, n_block, n_block_min, keys, word);
            visible.set_shared_row(word);
            if (n_block >= n_block_min) {
                visible.limit(params, binfo, thread_tile, n_block * kBlockN, keys);
            }
            return n_block;
        }
        for (; n_block >= n_block_min; --n_block) {
            const bool any = visible.load(params, binfo, bidb, bidh, thread_tile, n_block * kBlockN, keys);
            if (mask.ptr == nullptr || __syncthreads_or(any)) { break; }
        }
        return n_block;
    }

    // The bias of the tile to visit next, if there is one. Call before K's tile is copied: the kernel waits
    // for groups, and the fence after K's copy commits both.
    __forceinline__ __device__ void fetch(const int n_block, const int n_block_min) const {
        const int size = params.fork.scores.bias_is_float ? 4 : 2,
                  keys = num_keys(params, binfo) - n_block * kBlockN;
        if (params.fork.scores.stage_at == 0 || n_block < n_block_min || keys <= 0) { return; }
        ForwardStage<Kernel_traits>::fetch(params.fork.scores, bias + int64_t(n_block) * kBlockN * size,
            binfo.actual_seqlen_q - first_row(), min(keys, kBlockN));
    }

    template<typename Tensor>
    __forceinline__ __device__ void advance(
        const int from, const int to, Tensor &tKgK, Tensor &tVgV, const int *block_table) const {
        if (from == to) { return; }
        if (block_table == nullptr) {
            tKgK.data() = tKgK.data() + int64_t(to - from) * kBlockN * params.k_row_stride;
            tVgV.data() = tVgV.data() + int64_t(to - from) * kBlockN * params.v_row_stride;
        } else {
            const int page = from * kBlockN / params.page_block_size,
                      to_page = to * kBlockN / params.page_block_size;
            const int64_t pages = block_table[to_page] - block_table[page];
            const int64_t rows = (to * kBlockN - to_page * params.page_block_size)
                - (from * kBlockN - page * params.page_block_size);
            tKgK.data() = tKgK.data() + (pages * params.k_batch_stride + rows * params.k_row_stride);
            tVgV.data() = tVgV.data() + (pages * params.v_batch_stride + rows * params.v_row_stride);
        }
    }
};

}  // namespace fork_bias
}  // namespace FLASH_NAMESPACE

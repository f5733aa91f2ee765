// A product of fragments as Hopper's tensor cores round it, by the model that MMA-Sim found and compared bit for bit with an
// H100 (Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores", arXiv:2511.10909): up to 16
// exact products and the number that they are added to are cut off 25 bits below the largest exponent among them, and their
// sum is cut off to float. A product's exponent is the sum of its factors', whatever comes of their magnitudes; one of zero
// has the least that a float has.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

struct Fp16 {
    static constexpr int kMantissa = 10, kBias = 15;
    static float number(uint16_t bits) { return _cvtsh_ss(bits); }
};
struct Bf16 {
    static constexpr int kMantissa = 7, kBias = 127;
    static float number(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
};
struct Fp32 {
    static constexpr int kMantissa = 23, kBias = 127;
};

constexpr int kFraction = 25;  // bits kept below the largest exponent

// Eight numbers taken apart: significand * 2**(exponent - Format::kMantissa). The loops over eight are the compiler's to unroll.
template <typename Format>
struct Eight {
    int32_t exponent[8], significand[8];
    int32_t special = 0;  // not 0: one of them is not finite

    template <typename Bits>
    explicit Eight(const Bits *bits) {
        constexpr int32_t kOne = 1 << Format::kMantissa, kTop = 2 * Format::kBias + 1;
        for (int n = 0; n < 8; ++n) {
            const int32_t word = int32_t(uint32_t(bits[n]) << (32 - 8 * sizeof(Bits)));
            const int32_t size = int32_t(uint32_t(bits[n]) & (uint32_t(kOne) * (kTop + 1) - 1));
            const int32_t field = size >> Format::kMantissa, magnitude = (size & (kOne - 1)) | (field ? kOne : 0);
            exponent[n] = std::max(field, 1) - Format::kBias - (size ? 0 : 1000);  // zero's is below all others
            significand[n] = word < 0 ? -magnitude : magnitude;
            special |= field == kTop;
        }
    }
};

// number * 2**-by, cut off.
inline int32_t shifted(int32_t number, int32_t by) {
    const int32_t sign = number >> 31;
    return ((((number ^ sign) - sign) >> std::min(by, 31)) ^ sign) - sign;
}

// sum * 2**(exponent - kFraction), cut off to float. Subnormal results are put together: the thread that interprets flushes them.
inline float cut_off(int64_t sum, int32_t exponent) {
    const double exact = double(sum) * std::bit_cast<double>(uint64_t(1023 + exponent - kFraction) << 52), size = std::fabs(exact);
    const float normal = float(std::bit_cast<double>(std::bit_cast<uint64_t>(exact) & ~0x1fffffffull));  // the bits that a float has
    const int32_t subnormal = int32_t(std::min(size, 0x1p-126) * 0x1p149) | (sum < 0 ? INT32_MIN : 0);
    return size < 0x1p-126 ? std::bit_cast<float>(subnormal) : normal;
}

// c += a b, where a row of a and all of b go into one sum: Depth is 8 or 16.
template <typename Format, int Depth>
void multiply_add(const uint16_t (&a)[16][Depth], const uint16_t (&b)[Depth][8], float (&c)[16][8]) {
    alignas(64) int32_t exponents[Depth][8], significands[Depth][8];
    int32_t special = 0;
    for (int k = 0; k < Depth; ++k) {
        const Eight<Format> row(b[k]);
        std::copy_n(row.exponent, 8, exponents[k]);
        std::copy_n(row.significand, 8, significands[k]);
        special |= row.special;
    }
    for (int m = 0; m < 16; ++m) {
        uint32_t bits[8];
        std::memcpy(bits, c[m], sizeof bits);
        const Eight<Fp32> own(bits);
        int32_t exponent[Depth], significand[Depth], unusual = special | own.special, largest[8], sums[8];
        int64_t total[8];
        for (int k = 0; k < Depth; k += 8) {
            const Eight<Format> part(a[m] + k);
            std::copy_n(part.exponent, 8, exponent + k);
            std::copy_n(part.significand, 8, significand + k);
            unusual |= part.special;
        }
        for (int n = 0; n < 8; ++n) { largest[n] = std::max(own.exponent[n], -126); }
        for (int k = 0; k < Depth; ++k) {
            for (int n = 0; n < 8; ++n) { largest[n] = std::max(largest[n], exponent[k] + exponents[k][n]); }
        }
        for (int n = 0; n < 8; ++n) {
            total[n] = shifted(own.significand[n] * (1 << (kFraction - Fp32::kMantissa)), largest[n] - own.exponent[n]);
        }
        for (int k = 0; k < Depth; k += 8) {
            for (int n = 0; n < 8; ++n) { sums[n] = 0; }
            for (int j = k; j < k + 8; ++j) {  // each product is below 2**27, so that eight fit
                const int32_t factor = significand[j] * (1 << (kFraction - 2 * Format::kMantissa));
                for (int n = 0; n < 8; ++n) { sums[n] += shifted(factor * significands[j][n], largest[n] - exponent[j] - exponents[j][n]); }
            }
            for (int n = 0; n < 8; ++n) { total[n] += sums[n]; }
        }
        for (int n = 0; n < 8; ++n) { c[m][n] = cut_off(total[n], largest[n]); }
        for (int n = 0; unusual && n < 8; ++n) {  // what is not finite goes by IEEE's rules
            double sum = std::bit_cast<float>(bits[n]);
            for (int k = 0; k < Depth; ++k) { sum += double(Format::number(a[m][k])) * Format::number(b[k][n]); }
            if (!std::isfinite(sum)) { c[m][n] = std::isnan(sum) ? std::bit_cast<float>(0x7fffffffu) : float(sum); }
        }
    }
}

}  // namespace emulator

// Dropout: which probabilities it keeps, how many, and that backward drops the same.

#include <algorithm>
#include <cmath>

#include "harness.h"

using namespace harness;

namespace {

class Dropout : public OnGpu {};

// Which probabilities a call keeps. Values that are unit vectors make each row of the result a row of
// probabilities, of d keys at a time; random numbers follow from places and the seed, not from values.
std::vector<bool> kept_of(const Shape &shape) {
    std::vector<bool> kept(size_t(shape.b) * shape.h * shape.len_q * shape.len_k);
    for (int first = 0; first < shape.len_k; first += shape.d) {
        Inputs inputs = Inputs::draw(shape);
        std::fill(inputs.v.begin(), inputs.v.end(), 0.f);
        for (int b = 0; b < shape.b; ++b) {
            for (int j = first; j < std::min(first + shape.d, shape.len_k); ++j) {
                for (int h = 0; h < shape.h_k; ++h) {
                    inputs.v[((size_t(b) * shape.len_k + j) * shape.h_k + h) * shape.d + j - first] = 1.f;
                }
            }
        }
        const Calls calls(inputs);
        EXPECT_EQ(calls.run_forward(), cudaSuccess) << flash_attention_v2_last_error();
        const std::vector<float> out = numbers(calls.results(false).out, shape.dtype);
        for (int b = 0; b < shape.b; ++b) {
            for (int i = 0; i < shape.len_q; ++i) {
                for (int h = 0; h < shape.h; ++h) {
                    for (int j = first; j < std::min(first + shape.d, shape.len_k); ++j) {
                        const size_t row = (size_t(b) * shape.len_q + i) * shape.h + h;
                        kept[((size_t(b) * shape.h + h) * shape.len_q + i) * shape.len_k + j] =
                            out[row * shape.d + j - first] != 0.f;
                    }
                }
            }
        }
    }
    return kept;
}

Shape dropping(float rate) {
    Shape shape;
    shape.b = 2;
    shape.len_q = 64;
    shape.len_k = 96;
    shape.scale = 0.05f;  // no probability so small that it is 0
    shape.dropout = rate;
    shape.seed = 1234;
    return shape;
}

TEST_F(Dropout, KeepsTheShareThatIsAskedFor) {
    for (const float rate : {0.1f, 0.5f}) {
        const Shape shape = dropping(rate);
        NEEDS_KERNELS(shape, false);
        const std::vector<bool> kept = kept_of(shape);
        const double count = double(kept.size()), keeps = double(std::count(kept.begin(), kept.end(), true));
        // Random numbers are bytes, so a rate is one of 256: floor(255 (1 - rate)) and what is below are
        // kept.
        const double share = (std::floor(255 * (1 - double(rate))) + 1) / 256;
        EXPECT_NEAR(keeps, count * share, 5 * std::sqrt(count * share * (1 - share))) << "rate " << rate;
    }
}

TEST_F(Dropout, KeepsAllAtRateZero) {
    const Shape shape = dropping(0.f);
    NEEDS_KERNELS(shape, false);
    const std::vector<bool> kept = kept_of(shape);
    EXPECT_EQ(std::count(kept.begin(), kept.end(), false), 0);
}

TEST_F(Dropout, ForwardAndBackwardDropTheSame) {
    const Shape shape = dropping(0.25f);
    NEEDS_KERNELS(shape, true);
    const std::vector<bool> kept = kept_of(shape);
    const Inputs inputs = Inputs::draw(shape);
    const Calls calls(inputs);
    SUCCEEDS(calls.run_forward());
    SUCCEEDS(calls.run_backward());
    expect_accurate(inputs, calls.results(), true, [&](int b, int h, int i, int j) {
        const size_t row = (size_t(b) * shape.h + h) * shape.len_q + i;
        return kept[row * shape.len_k + j] ? 1 / (1 - double(shape.dropout)) : 0.0;
    });
}

TEST_F(Dropout, SeedAndOffsetDecideAlone) {
    const Shape shape = dropping(0.25f);
    NEEDS_KERNELS(shape, false);
    const Inputs inputs = Inputs::draw(shape);
    Calls calls(inputs);
    const auto out = [&](uint64_t seed, uint64_t offset) {
        calls.forward.options.seed = seed;
        calls.forward.options.offset = offset;
        calls.poison();
        EXPECT_EQ(calls.run_forward(), cudaSuccess) << flash_attention_v2_last_error();
        return calls.results(false).out;
    };
    const Bits first = out(7, 0);
    EXPECT_EQ(out(7, 0), first);
    EXPECT_NE(out(8, 0), first);
    EXPECT_NE(out(7, 4), first);
}

TEST_F(Dropout, SeedAndOffsetMayLieOnTheDevice) {
    const Shape shape = dropping(0.25f);
    NEEDS_KERNELS(shape, true);
    const Inputs inputs = Inputs::draw(shape);
    Calls calls(inputs);
    calls.forward.options.seed = calls.backward.options.seed = 7;
    calls.forward.options.offset = calls.backward.options.offset = 12;
    SUCCEEDS(calls.run_forward());
    const Bits on_host = calls.results(false).out;
    calls.poison();
    const Array seed(std::vector<int64_t>{7}), offset(std::vector<int64_t>{8});
    calls.forward.options.seed = 0;
    calls.forward.options.offset = 4;
    calls.forward.options.seed_at = seed.as<int64_t>();
    calls.forward.options.offset_at = offset.as<int64_t>();
    SUCCEEDS(calls.run_forward());
    EXPECT_EQ(calls.results(false).out, on_host);
    SUCCEEDS(calls.run_backward());
    const Results host_backward = calls.results();
    calls.backward.options = calls.forward.options;
    SUCCEEDS(calls.run_backward());
    EXPECT_EQ(calls.results().dv, host_backward.dv);
}

}  // namespace

// Sequences of one length through flash_attention_v2_run_forward and …_backward.

#include <tuple>

#include "harness.h"

using namespace harness;

namespace {

class HeadDims : public OnGpu, public testing::WithParamInterface<std::tuple<int, int32_t, bool>> {};

TEST_P(HeadDims, ForwardAndBackwardAgreeWithTheCpu) {
    Shape shape;
    std::tie(shape.d, shape.dtype, shape.causal) = GetParam();
    shape.len_q = shape.len_k = emulated() ? 65 : 200;
    check(shape);
}

INSTANTIATE_TEST_SUITE_P(Extended, HeadDims,
    testing::Combine(testing::Values(8, 16, 32, 40, 64, 72, 96, 104, 128, 160, 192, 224, 256),
        testing::Values(kHalf, kBfloat), testing::Bool()),
    [](const auto &info) {
        return "d" + std::to_string(std::get<0>(info.param))
            + (std::get<1>(info.param) == kHalf ? "_float16" : "_bfloat16")
            + (std::get<2>(info.param) ? "_causal" : "");
    });

// Around the edges of tiles, which are of 64, 128 or 256 rows or keys.
const int kLengths[] = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257};

class Lengths : public OnGpu, public testing::WithParamInterface<std::tuple<int, int>> {};

TEST_P(Lengths, OfQueriesAndKeysAlike) {
    Shape shape;
    std::tie(shape.d, shape.len_q) = GetParam();
    shape.h = shape.h_k = emulated() ? 1 : 2;
    shape.len_k = shape.len_q;
    for (const bool causal : {false, true}) {
        shape.causal = causal;
        check(shape);
    }
}

TEST_P(Lengths, OfQueriesAndKeysThatDiffer) {
    for (const int other : {1, 65, 128}) {
        Shape shape;
        std::tie(shape.d, shape.len_q) = GetParam();
        shape.h = shape.h_k = 1;
        shape.len_k = other;
        check(shape);
        std::swap(shape.len_q, shape.len_k);
        shape.causal = true;
        check(shape);
    }
}

INSTANTIATE_TEST_SUITE_P(Extended, Lengths,
    testing::Combine(testing::Values(32, 64, 128, 256), testing::ValuesIn(kLengths)), [](const auto &info) {
        return "d" + std::to_string(std::get<0>(info.param)) + "_" + std::to_string(std::get<1>(info.param))
            + "_tokens";
    });

class Extended : public OnGpu {};

TEST_F(Extended, CausalQueriesBeforeTheFirstKeySeeNothing) {
    Shape shape;
    shape.len_q = 40;
    shape.len_k = 9;
    shape.causal = true;
    check(shape);
}

TEST_F(Extended, GroupedHeads) {
    for (const int h_k : {1, 2}) {
        Shape shape;
        shape.h = 4;
        shape.h_k = h_k;
        shape.causal = true;
        check(shape);
        shape.len_q = 1;  // decode: a group's queries become rows of one head
        check(shape, false);
    }
}

TEST_F(Extended, HeadsFirstInMemory) {
    Shape shape;
    shape.b = 2;
    shape.h = 4;
    shape.h_k = 2;
    shape.len_k = 50;
    shape.heads_first = true;
    check(shape);
}

TEST_F(Extended, Windows) {
    for (const auto &[left, right] :
        {std::pair(10, 0), std::pair(0, 5), std::pair(20, 20), std::pair(-1, 3)}) {
        Shape shape;
        shape.len_q = shape.len_k = 100;
        shape.window_left = left;
        shape.window_right = right;
        check(shape);
    }
}

TEST_F(Extended, Softcap) {
    Shape shape;
    shape.softcap = 2.f;
    shape.len_k = 70;
    check(shape);
}

TEST_F(Extended, ScalesOfScores) {
    for (const float scale : {0.05f, 1.f}) {
        Shape shape;
        shape.scale = scale;
        check(shape);
    }
}

TEST_F(Extended, Slopes) {
    for (const bool causal : {false, true}) {
        Shape shape;
        shape.causal = causal;
        shape.alibi = true;
        shape.len_q = 33;
        check(shape);
    }
}

Scores drawn_scores(std::vector<int64_t> sizes, int32_t dtype, bool mask) {
    Scores made;
    size_t count = 1;
    for (const int64_t size : sizes) { count *= size_t(size); }
    made.sizes = std::move(sizes);
    made.dtype = dtype;
    made.numbers = drawn(count, dtype == kBool ? kFloat : dtype, 99);
    for (float &number : made.numbers) {
        if (mask) { number = number > -0.7f ? 1.f : 0.f; }
    }
    return made;
}

// "this build was made without" them is an answer too: no-bias among its kernels.
void check_scores(const Inputs &inputs, bool backward = true) {
    const Calls calls(inputs);
    const cudaError_t status = calls.run_forward();
    if (status == cudaErrorNotSupported) { GTEST_SKIP() << flash_attention_v2_last_error(); }
    ASSERT_EQ(status, cudaSuccess) << flash_attention_v2_last_error();
    if (backward) { SUCCEEDS(calls.run_backward()); }
    expect_accurate(inputs, calls.results(backward), backward);
}

TEST_F(Extended, MasksAndBiasesOfEveryShape) {
    Shape shape;
    shape.b = 2;
    shape.len_q = 20;
    shape.len_k = 40;
    NEEDS_KERNELS(shape, true);
    const std::vector<std::vector<int64_t>> shapes = {
        {2, 2, 20, 40}, {1, 2, 20, 40}, {2, 1, 20, 40}, {2, 2, 1, 40}, {2, 1, 20, 1}, {1, 1, 1, 40}};
    for (const std::vector<int64_t> &sizes : shapes) {
        Inputs inputs = Inputs::draw(shape);
        inputs.mask = drawn_scores(sizes, kBool, true);
        check_scores(inputs);
        if (IsSkipped()) { return; }
        for (const int32_t dtype : {shape.dtype, kFloat}) {
            inputs = Inputs::draw(shape);
            inputs.bias = drawn_scores(sizes, dtype, false);
            check_scores(inputs);
        }
    }
}

TEST_F(Extended, AMaskAndABiasInOneCausalCall) {
    Shape shape;
    shape.causal = true;
    NEEDS_KERNELS(shape, true);
    Inputs inputs = Inputs::draw(shape);
    inputs.mask = drawn_scores({1, 1, 64, 64}, kBool, true);
    inputs.bias = drawn_scores({1, 2, 64, 64}, kHalf, false);
    check_scores(inputs);
}

TEST_F(Extended, AMaskIsReadWhereItLies) {
    Shape shape;
    shape.len_q = shape.len_k = 24;
    NEEDS_KERNELS(shape, false);
    Inputs inputs = Inputs::draw(shape);
    inputs.mask = drawn_scores({1, 1, 24, 24}, kBool, true);
    Calls calls(inputs);
    // The same mask, transposed in memory.
    std::vector<uint8_t> turned(24 * 24);
    for (int i = 0; i < 24; ++i) {
        for (int j = 0; j < 24; ++j) { turned[j * 24 + i] = uint8_t(inputs.mask.at(0, 0, i, j)); }
    }
    const Array memory(turned);
    calls.forward.options.mask.data = memory.data();
    calls.forward.options.mask.strides[2] = 1;
    calls.forward.options.mask.strides[3] = 24;
    const cudaError_t status = calls.run_forward();
    if (status == cudaErrorNotSupported) { GTEST_SKIP() << flash_attention_v2_last_error(); }
    ASSERT_EQ(status, cudaSuccess) << flash_attention_v2_last_error();
    expect_accurate(inputs, calls.results(false), false);
}

TEST_F(Extended, LseNeedNotBeGiven) {
    const Inputs inputs = Inputs::draw({});
    NEEDS_KERNELS(inputs.shape, false);
    Calls calls(inputs);
    SUCCEEDS(calls.run_forward());
    const Bits out = calls.results(false).out;
    calls.poison();
    calls.forward.lse = {};
    SUCCEEDS(calls.run_forward());
    EXPECT_EQ(calls.results(false).out, out);
}

TEST_F(Extended, BackwardFromFloatIsNearerThanFromHalf) {
    Shape shape;
    shape.len_q = shape.len_k = emulated() ? 96 : 256;
    NEEDS_KERNELS(shape, true);
    const Inputs inputs = Inputs::draw(shape);
    Calls calls(inputs);
    SUCCEEDS(calls.run_forward());
    SUCCEEDS(calls.run_backward());
    const Results precise = calls.results();
    std::vector<float> rounded = precise.lse;
    for (float &number : rounded) { number = rounding(kHalf)(number); }
    const Array half_lse(rounded);
    calls.backward.lse.data = half_lse.data();
    SUCCEEDS(calls.run_backward());
    const Results coarse = calls.results();
    const reference::Answer exact = reference::exact(sequence(inputs, 0, true));
    const auto off = [&](const Bits &got) {
        const std::vector<float> found = numbers(got, kHalf);
        double sum = 0;
        for (size_t i = 0; i < found.size(); ++i) { sum += std::abs(double(found[i]) - exact.dv[i]); }
        return sum / double(found.size());
    };
    EXPECT_LT(off(precise.dv), off(coarse.dv));
}

}  // namespace

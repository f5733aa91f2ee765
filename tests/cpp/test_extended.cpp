// Sequences of one length through flash_attention_v2_run_forward and …_backward.

#include <algorithm>
#include <cmath>
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

// Without sequences, queries or keys nothing is launched, and all that is there is 0.
TEST_F(Extended, NothingToCompute) {
    const auto zero = [](uint16_t element) { return element == 0; };
    for (const auto &[b, len_q, len_k, h_k] : {std::tuple(0, 5, 7, 1), std::tuple(2, 0, 7, 2),
             std::tuple(2, 0, 7, 1), std::tuple(2, 5, 0, 1), std::tuple(0, 0, 0, 2)}) {
        for (const int split_size : {0, 128}) {
            Shape shape;
            shape.b = b;
            shape.h_k = h_k;
            shape.len_q = len_q;
            shape.len_k = len_k;
            shape.split_size = split_size;
            NEEDS_KERNELS(shape, true);
            const Inputs inputs = Inputs::draw(shape);
            Calls calls(inputs);
            calls.backward.deterministic = 1;
            SUCCEEDS(calls.run_forward()) << shape.told();
            SUCCEEDS(calls.run_backward()) << shape.told();
            const Results got = calls.results();
            for (const Bits *const array : {&got.out, &got.dq, &got.dk, &got.dv}) {
                EXPECT_TRUE(std::all_of(array->begin(), array->end(), zero)) << shape.told();
            }
            for (const float lse : got.lse) { EXPECT_EQ(lse, INFINITY) << shape.told(); }
            size_t bytes = 1;
            SUCCEEDS(flash_attention_v2_forward_workspace(&calls.forward, &bytes));
            SUCCEEDS(flash_attention_v2_backward_workspace(&calls.backward, &bytes));
        }
    }
}

// A sink is as a key that all rows see, whose value is 0, with a bias for its score.
TEST_F(Extended, ASinkIsAsAKeyWithoutAValue) {
    Shape shape;
    shape.b = 2;
    shape.h_k = 1;
    shape.len_q = 20;
    shape.len_k = 33;
    NEEDS_KERNELS(shape, true);
    const Inputs inputs = Inputs::draw(shape);
    const std::vector<float> sinks{1.5f, -0.5f};
    Inputs with_key = inputs;
    const int keys = with_key.shape.len_k = shape.len_k + 1, row = shape.h_k * shape.d;
    for (std::vector<float> *const array : {&with_key.k, &with_key.v}) {
        array->insert(array->begin() + shape.len_k * row, row, 0.f);
        array->insert(array->end(), row, 0.f);
    }
    with_key.bias = {{1, shape.h, 1, keys}, std::vector<float>(shape.h * keys), kFloat};
    for (int head = 0; head < shape.h; ++head) { with_key.bias.numbers[(head + 1) * keys - 1] = sinks[head]; }
    Calls as_key(with_key);
    if (as_key.run_forward() == cudaErrorNotSupported) { GTEST_SKIP() << flash_attention_v2_last_error(); }
    SUCCEEDS(as_key.run_backward());
    const Results expected = as_key.results();
    const auto near = [&](const Bits &got, const Bits &other, const char *name) {
        const std::vector<float> a = numbers(got, kHalf), b = numbers(other, kHalf);
        const size_t each = a.size() / shape.b;  // the sink's key is each sequence's last
        for (size_t i = 0; i < a.size(); ++i) {
            ASSERT_NEAR(a[i], b[i / each * (b.size() / shape.b) + i % each], 0.01) << name << " " << i;
        }
    };
    for (const int stride : {1, 3}) {
        std::vector<float> apart(2 * stride, NAN);
        for (int head = 0; head < shape.h; ++head) { apart[head * stride] = sinks[head]; }
        const Array whole(apart), halves(bits(apart, kHalf)), dsink(2 * sizeof(float));
        for (const bool half : {false, true}) {
            Calls calls(inputs);
            for (flash_attention_v2_options *const options :
                {&calls.forward.options, &calls.backward.options}) {
                options->learnable_sink = (half ? halves : whole).data();
                options->learnable_sink_dtype = half ? kHalf : kFloat;
                options->learnable_sink_stride = stride == 1 ? 0 : stride;
            }
            calls.backward.options.dsink = dsink.as<float>();
            dsink.fill(0xff);
            SUCCEEDS(calls.run_forward());
            SUCCEEDS(calls.run_backward());
            const Results got = calls.results();
            near(got.out, expected.out, "out");
            near(got.dq, expected.dq, "dq");
            near(got.dk, expected.dk, "dk");
            near(got.dv, expected.dv, "dv");
            for (int head = 0; head < shape.h; ++head) {
                EXPECT_NEAR(dsink.got<float>()[head], expected.dbias[(head + 1) * keys - 1], 0.02) << head;
            }
        }
    }
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

// The deterministic mode: what a row's bits do not depend on. docs/contract.md.

#include "harness.h"

using namespace harness;

namespace {

class Mode : public OnGpu {
protected:
    void TearDown() override { EXPECT_EQ(flash_attention_v2_set_deterministic(0, 0), cudaSuccess); }
};

Results run(const Inputs &inputs, bool backward = true) {
    const Calls calls(inputs);
    EXPECT_EQ(calls.run_forward(), cudaSuccess) << flash_attention_v2_last_error();
    if (backward) { EXPECT_EQ(calls.run_backward(), cudaSuccess) << flash_attention_v2_last_error(); }
    return calls.results(backward);
}

Inputs alone(const Inputs &batch, int b) {
    Inputs made;
    made.shape = batch.shape;
    made.shape.b = 1;
    const auto part = [&](const std::vector<float> &whole) {
        const size_t each = whole.size() / batch.shape.b;
        return std::vector<float>(whole.begin() + b * each, whole.begin() + (b + 1) * each);
    };
    made.q = part(batch.q);
    made.k = part(batch.k);
    made.v = part(batch.v);
    made.dout = part(batch.dout);
    return made;
}

template<typename Element>
std::vector<Element> share(const std::vector<Element> &whole, int parts, int index) {
    const size_t each = whole.size() / parts;
    return {whole.begin() + index * each, whole.begin() + (index + 1) * each};
}

Shape split_shape(bool causal) {
    Shape shape;
    shape.b = 3;
    shape.len_q = 40;
    shape.len_k = emulated() ? 300 : 700;
    shape.causal = causal;
    shape.split_size = 128;
    return shape;
}

TEST_F(Mode, ARowsBitsDoNotDependOnTheBatch) {
    for (const bool causal : {false, true}) {
        const Shape shape = split_shape(causal);
        NEEDS_KERNELS(shape, true);
        const Inputs batch = Inputs::draw(shape);
        const Results together = run(batch);
        for (int b = 0; b < shape.b; ++b) {
            const Results own = run(alone(batch, b));
            EXPECT_EQ(own.out, share(together.out, shape.b, b));
            EXPECT_EQ(own.dq, share(together.dq, shape.b, b));
            EXPECT_EQ(own.dk, share(together.dk, shape.b, b));
            EXPECT_EQ(own.dv, share(together.dv, shape.b, b));
        }
    }
}

TEST_F(Mode, ARowsBitsDoNotDependOnOtherQueries) {
    Shape shape = split_shape(true);
    shape.b = 1;
    NEEDS_KERNELS(shape, false);
    const Inputs prefill = Inputs::draw(shape);
    const Results all = run(prefill, false);
    Inputs last = prefill;  // the last query alone: decode
    last.shape.len_q = 1;
    const size_t row = size_t(shape.h) * shape.d;
    last.q.assign(prefill.q.end() - row, prefill.q.end());
    last.dout.resize(row);
    EXPECT_EQ(run(last, false).out, Bits(all.out.end() - row, all.out.end()));
}

TEST_F(Mode, RunsHaveTheSameBits) {
    const Shape shape = split_shape(true);
    NEEDS_KERNELS(shape, true);
    const Inputs inputs = Inputs::draw(shape);
    EXPECT_TRUE(run(inputs) == run(inputs));
}

TEST_F(Mode, IsExactWithEverySplitSize) {
    for (const int64_t split_size : {128, 256, 2048}) {
        Shape shape = split_shape(true);
        shape.b = 1;
        shape.split_size = split_size;
        check(shape);
    }
}

TEST_F(Mode, TheProcessAndTheCallSayTheSame) {
    Shape shape = split_shape(false);
    shape.b = 1;
    NEEDS_KERNELS(shape, false);
    const Results of_call = run(Inputs::draw(shape), false);
    SUCCEEDS(flash_attention_v2_set_deterministic(1, 128));
    shape.split_size = -1;
    EXPECT_EQ(run(Inputs::draw(shape), false).out, of_call.out);
}

class ProcessWide : public testing::Test {
protected:
    void TearDown() override { EXPECT_EQ(flash_attention_v2_set_deterministic(0, 0), cudaSuccess); }
};

TEST_F(ProcessWide, TheModeIsToldAsItWasSet) {
    int enabled = -1;
    int64_t split_size = -1;
    SUCCEEDS(flash_attention_v2_set_deterministic(1, 512));
    SUCCEEDS(flash_attention_v2_get_deterministic(&enabled, &split_size));
    EXPECT_EQ(enabled, 1);
    EXPECT_EQ(split_size, 512);
    SUCCEEDS(flash_attention_v2_set_deterministic(0, 0));
    SUCCEEDS(flash_attention_v2_get_deterministic(&enabled, &split_size));
    EXPECT_EQ(enabled, 0);
    EXPECT_EQ(split_size, 2048);  // the default
}

TEST_F(ProcessWide, ASplitSizeThatNoKernelTakesIsRefused) {
    for (const int64_t wrong : {int64_t(100), int64_t(-5), int64_t(1) << 40}) {
        EXPECT_EQ(flash_attention_v2_set_deterministic(1, wrong), cudaErrorInvalidValue) << wrong;
        EXPECT_NE(std::string(flash_attention_v2_last_error()).find("split_size"), std::string::npos);
    }
    EXPECT_EQ(flash_attention_v2_set_deterministic(2, 128), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_get_deterministic(nullptr, nullptr), cudaErrorInvalidValue);
}

}  // namespace

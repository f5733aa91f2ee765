// flash_attention_v2.h: the functions as their documentation has them.

#include <tuple>

#include "harness.h"

using namespace harness;

namespace {

struct Published {
    FlashAttentionV2Config config;
    const char *name;
};
// batch, length, heads, head dim: as documented.
const Published kPublished[] = {
    {{1, 32, 4, 16, false, 0.f, 0}, "tiny_standard"},
    {{1, 32, 4, 16, true, 0.f, 0}, "tiny_causal"},
    {{1, 64, 8, 32, false, 0.f, 0}, "small_standard"},
    {{1, 64, 8, 32, true, 0.f, 0}, "small_causal"},
    {{2, 128, 8, 32, false, 0.f, 0}, "medium_standard"},
    {{2, 128, 8, 32, true, 0.f, 0}, "medium_causal"},
};

Shape shape_of(const FlashAttentionV2Config &config, bool heads_first) {
    Shape shape;
    shape.b = config.batch_size;
    shape.len_q = shape.len_k = config.seq_len;
    shape.h = shape.h_k = config.num_heads;
    shape.d = config.head_dim;
    shape.causal = config.use_causal_mask;
    shape.dropout = config.dropout_rate;
    shape.heads_first = heads_first;
    return shape;
}

// The arrays are those of a Calls; what is called is the documented function.
struct Documented {
    explicit Documented(const FlashAttentionV2Config &of, bool heads_first = false)
        : config(of),
          inputs(Inputs::draw(shape_of(of, heads_first))),
          calls(inputs),
          l(size_t(of.batch_size) * of.num_heads * of.seq_len * sizeof(half)) {
        l.fill(0xff);
    }
    static half *at(const flash_attention_v2_tensor &tensor) { return static_cast<half *>(tensor.data); }
    cudaError_t forward(cudaStream_t stream = nullptr) const {
        const flash_attention_v2_forward_call &of = calls.forward;
        return flash_attention_v2_forward(
            at(of.q), at(of.k), at(of.v), at(of.out), l.as<half>(), config, stream);
    }
    cudaError_t backward(cudaStream_t stream = nullptr) const {
        const flash_attention_v2_backward_call &of = calls.backward;
        return flash_attention_v2_backward(at(of.q), at(of.k), at(of.v), at(of.out), l.as<half>(),
            at(of.dout), at(of.dq), at(of.dk), at(of.dv), config, stream);
    }
    Results results(bool with_gradients) const {
        Results made = calls.results(with_gradients);
        made.lse = numbers(l.got<uint16_t>(), kHalf);
        return made;
    }
    FlashAttentionV2Config config;
    Inputs inputs;
    Calls calls;
    Array l;
};

// Any kernels serve: those of a larger head dim where there are no others.
class Documents : public OnGpu {
protected:
    void SetUp() override {
        OnGpu::SetUp();
        if (!IsSkipped() && built_head_dim() == 0) {
            GTEST_SKIP() << "this build has no head dim with both passes in float16";
        }
    }
};

class Layouts : public Documents {
protected:
    void TearDown() override {
        EXPECT_EQ(flash_attention_v2_set_layout(FlashAttentionV2Layout::batch_seq_heads_dim), cudaSuccess);
    }
};

class PublishedConfigurations : public Layouts, public testing::WithParamInterface<std::tuple<int, bool>> {};

TEST_P(PublishedConfigurations, ForwardAndBackwardAgreeWithTheCpu) {
    const auto [which, heads_first] = GetParam();
    const FlashAttentionV2Config &config = kPublished[which].config;
    ASSERT_TRUE(is_config_valid(config));
    SUCCEEDS(flash_attention_v2_set_layout(heads_first ? FlashAttentionV2Layout::batch_heads_seq_dim
                                                       : FlashAttentionV2Layout::batch_seq_heads_dim));
    const Documented call(config, heads_first);
    SUCCEEDS(call.forward());
    SUCCEEDS(call.backward());
    expect_accurate(call.inputs, call.results(true), true, {}, true);
}

INSTANTIATE_TEST_SUITE_P(Documented, PublishedConfigurations,
    testing::Combine(testing::Range(0, 6), testing::Bool()), [](const auto &info) {
        return std::string(kPublished[std::get<0>(info.param)].name)
            + (std::get<1>(info.param) ? "_heads_first" : "_heads_behind");
    });

TEST_F(Layouts, TheSameNumbersHaveTheSameBitsInBoth) {
    const FlashAttentionV2Config config{2, 65, 3, 32, true, 0.f, 0};
    const Documented one(config), other(config, true);
    SUCCEEDS(one.forward());
    SUCCEEDS(one.backward());
    SUCCEEDS(flash_attention_v2_set_layout(FlashAttentionV2Layout::batch_heads_seq_dim));
    SUCCEEDS(other.forward());
    SUCCEEDS(other.backward());
    const Results first = one.results(true), second = other.results(true);
    EXPECT_EQ(first.out, second.out);
    EXPECT_EQ(first.dk, second.dk);
    EXPECT_EQ(first.dv, second.dv);
}

TEST_F(Documents, AHeadDimBelowTheKernelsIsPaddedUnseen) {
    for (const int head_dim : {8, 16, 24}) {
        const Documented call({1, 40, 2, head_dim, true, 0.f, 0});
        SUCCEEDS(call.forward());
        SUCCEEDS(call.backward());
        expect_accurate(call.inputs, call.results(true), true, {}, true);
    }
}

TEST_F(Documents, BackwardMayOverwriteForwardsGradientsAgain) {
    const Documented call({1, 33, 2, 32, false, 0.f, 0});
    SUCCEEDS(call.forward());
    SUCCEEDS(call.backward());
    const Results first = call.results(true);
    SUCCEEDS(call.backward());
    const Results second = call.results(true);
    EXPECT_EQ(first.out, second.out);
    EXPECT_EQ(first.dk, second.dk);
}

TEST_F(Documents, DropoutFollowsFromItsSeed) {
    FlashAttentionV2Config config{1, 64, 2, 32, false, 0.3f, 42};
    const Documented one(config), again(config);
    config.seed = 43;
    const Documented other(config);
    for (const Documented *call : {&one, &again, &other}) { SUCCEEDS(call->forward()); }
    EXPECT_EQ(one.results(false).out, again.results(false).out);
    EXPECT_NE(one.results(false).out, other.results(false).out);
}

TEST_F(Documents, InitAndCleanupGoInAnyOrderAndAgain) {
    const Documented call({1, 32, 2, 32, false, 0.f, 0});
    SUCCEEDS(flash_attention_v2_cleanup());
    SUCCEEDS(flash_attention_v2_cleanup());
    SUCCEEDS(flash_attention_v2_init());
    SUCCEEDS(flash_attention_v2_init());
    SUCCEEDS(call.forward());
    const Bits first = call.results(false).out;
    SUCCEEDS(flash_attention_v2_cleanup());
    call.calls.poison();
    SUCCEEDS(call.forward());  // ready again by itself
    EXPECT_EQ(call.results(false).out, first);
    SUCCEEDS(flash_attention_v2_init());
    SUCCEEDS(flash_attention_v2_cleanup());
}

}  // namespace

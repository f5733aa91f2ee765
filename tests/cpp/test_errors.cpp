// Every error: its code, and that its words name what is wrong. Most need no GPU: mistakes are found first.

#include <cmath>
#include <functional>
#include <limits>
#include <tuple>

#include "harness.h"

using namespace harness;

namespace {

std::string words() { return flash_attention_v2_last_error(); }

#define EXPECT_WORDS(PART) EXPECT_NE(words().find(PART), std::string::npos) << "words: " << words()

// Calls that are right until a test makes them wrong. Where there is no GPU, addresses are made up: they are
// looked at, but nothing is read there.
class Errors : public testing::Test {
protected:
    void SetUp() override {
        for (const int d : {256, 192, 128, 96, 64, 32}) {
            if (flash_attention_v2_has_kernels(d, kHalf, 0)) { d_ = d; }
        }
        if (d_ == 0) { GTEST_SKIP() << "this build has no kernels for float16, forward"; }
        ASSERT_EQ(flash_attention_v2_forward_defaults(&forward, sizeof(forward)), cudaSuccess);
        ASSERT_EQ(flash_attention_v2_backward_defaults(&backward, sizeof(backward)), cudaSuccess);
        if (devices() > 0) { memory_ = std::make_unique<Array>(size_t(9) * kEach); }
        const std::vector<int64_t> rows{1, 16, 2, d_};
        forward.q = backward.q = tensor(at(0), kHalf, rows);
        forward.k = backward.k = tensor(at(1), kHalf, rows);
        forward.v = backward.v = tensor(at(2), kHalf, rows);
        forward.out = backward.out = tensor(at(3), kHalf, rows);
        forward.lse = backward.lse = tensor(at(4), kFloat, {1, 2, 16});
        backward.dout = tensor(at(5), kHalf, rows);
        backward.dq = tensor(at(6), kHalf, rows);
        backward.dk = tensor(at(7), kHalf, rows);
        backward.dv = tensor(at(8), kHalf, rows);
    }
    void *at(int index) const {
        char *const base = memory_ ? memory_->as<char>() : reinterpret_cast<char *>(uintptr_t(1) << 32);
        return base + index * kEach;
    }
    void expect_forward(cudaError_t status, const char *part) {
        EXPECT_EQ(flash_attention_v2_run_forward(&forward, nullptr), status) << words();
        EXPECT_WORDS(part);
        size_t bytes = 0;
        EXPECT_EQ(flash_attention_v2_forward_workspace(&forward, &bytes), status) << "of the workspace query";
    }
    void expect_backward(cudaError_t status, const char *part) {
        EXPECT_EQ(flash_attention_v2_run_backward(&backward, nullptr), status) << words();
        EXPECT_WORDS(part);
    }
    // Of a call without a mistake.
    static cudaError_t right() { return devices() > 0 ? cudaSuccess : cudaErrorNoDevice; }

    static constexpr size_t kEach = 16 * 2 * 256 * sizeof(float);
    flash_attention_v2_forward_call forward{};
    flash_attention_v2_backward_call backward{};
    int d_ = 0;

private:
    std::unique_ptr<Array> memory_;
};

// The same, where there are kernels for backward too.
class BackwardErrors : public Errors {
protected:
    void SetUp() override {
        Errors::SetUp();
        if (!IsSkipped() && !flash_attention_v2_has_kernels(d_, kHalf, 1)) {
            GTEST_SKIP() << "this build has no kernels for head dim " << d_ << " in float16, backward";
        }
    }
};

TEST_F(Errors, NoneWhereNothingIsWrong) {
    const cudaError_t status = flash_attention_v2_run_forward(&forward, nullptr);
    EXPECT_EQ(status, right()) << words();
    EXPECT_EQ(words().empty(), status == cudaSuccess);
}

TEST_F(BackwardErrors, NoneWhereNothingIsWrong) {
    EXPECT_EQ(flash_attention_v2_run_backward(&backward, nullptr), right()) << words();
}

TEST_F(Errors, NullCalls) {
    EXPECT_EQ(flash_attention_v2_run_forward(nullptr, nullptr), cudaErrorInvalidValue);
    EXPECT_WORDS("null");
    EXPECT_EQ(flash_attention_v2_run_backward(nullptr, nullptr), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_forward_defaults(nullptr, sizeof(forward)), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_backward_defaults(nullptr, sizeof(backward)), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_forward_workspace(&forward, nullptr), cudaErrorInvalidValue);
    EXPECT_WORDS("bytes");
}

TEST_F(Errors, SizesOfAnotherStruct) {
    for (const size_t size : {size_t(0), sizeof(forward) - 1, sizeof(forward) + 8}) {
        EXPECT_EQ(flash_attention_v2_forward_defaults(&forward, size), cudaErrorInvalidValue) << size;
        EXPECT_WORDS("size");
    }
    forward.size = 8;
    expect_forward(cudaErrorInvalidValue, "size=8");
    backward.size = sizeof(backward) + 64;
    expect_backward(cudaErrorInvalidValue, "size=");
}

TEST_F(Errors, ReservedThatIsNotZero) {
    const auto right = forward.options;
    forward.options.reserved[3] = 1;
    expect_forward(cudaErrorInvalidValue, "reserved");
    forward.options = right;
    forward.options.reserved_number = 1;
    expect_forward(cudaErrorInvalidValue, "reserved");
    forward.options = right;
    forward.options.learnable_sink_stride = 1;
    expect_forward(cudaErrorInvalidValue, "learnable_sink is null");
}

TEST_F(Errors, TensorsThatAreNotGiven) {
    using Call = flash_attention_v2_forward_call;
    for (const auto &[name, which] : {std::pair("q", &Call::q), std::pair("k", &Call::k),
             std::pair("v", &Call::v), std::pair("out", &Call::out)}) {
        const auto kept = forward.*which;
        forward.*which = {};
        expect_forward(cudaErrorInvalidValue, name);
        forward.*which = kept;
        (forward.*which).data = nullptr;  // which a workspace query allows
        EXPECT_EQ(flash_attention_v2_run_forward(&forward, nullptr), cudaErrorInvalidValue) << name;
        EXPECT_WORDS(name);
        forward.*which = kept;
    }
}

TEST_F(BackwardErrors, TensorsThatAreNotGiven) {
    using Back = flash_attention_v2_backward_call;
    for (const auto &[name, which] :
        {std::pair("q", &Back::q), std::pair("k", &Back::k), std::pair("v", &Back::v),
            std::pair("out", &Back::out), std::pair("lse", &Back::lse), std::pair("dout", &Back::dout),
            std::pair("dq", &Back::dq), std::pair("dk", &Back::dk), std::pair("dv", &Back::dv)}) {
        const auto kept = backward.*which;
        backward.*which = {};
        expect_backward(cudaErrorInvalidValue, name);
        backward.*which = kept;
        (backward.*which).data = nullptr;
        expect_backward(cudaErrorInvalidValue, name);
        backward.*which = kept;
    }
}

TEST_F(Errors, RanksThatNoKernelTakes) {
    for (const int32_t rank : {-1, 1, 2, 5}) {
        forward.q.rank = rank;
        expect_forward(cudaErrorInvalidValue, "q");
    }
}

TEST_F(Errors, DtypesThatNoKernelTakes) {
    forward.q.dtype = 99;
    expect_forward(cudaErrorInvalidValue, "q.dtype=99");
    forward.q.dtype = kInt;
    expect_forward(cudaErrorInvalidValue, "q has");
    forward.q.dtype = kHalf;
    forward.k.dtype = kBfloat;
    expect_forward(cudaErrorInvalidValue, "dtype");
    forward.k.dtype = kHalf;
    forward.lse.dtype = kHalf;
    expect_forward(cudaErrorInvalidValue, "lse");
}

TEST_F(Errors, Float32IsNotSupported) {
    for (flash_attention_v2_tensor *of : {&forward.q, &forward.k, &forward.v, &forward.out}) {
        of->dtype = kFloat;
    }
    expect_forward(cudaErrorNotSupported, "float32");
    for (flash_attention_v2_tensor *of : {&backward.q, &backward.k, &backward.v, &backward.out,
             &backward.dout, &backward.dq, &backward.dk, &backward.dv}) {
        of->dtype = kFloat;
    }
    expect_backward(cudaErrorNotSupported, "float32");
}

TEST_F(Errors, ShapesThatDoNotFit) {
    forward.k.sizes[1] = 17;
    expect_forward(cudaErrorInvalidValue, "v");  // k has a key more
    forward.k.sizes[1] = 16;
    forward.k.sizes[2] = forward.v.sizes[2] = 3;
    expect_forward(cudaErrorInvalidValue, "head");
    forward.k.sizes[2] = forward.v.sizes[2] = 2;
    forward.out.sizes[1] = 15;
    expect_forward(cudaErrorInvalidValue, "out");
    forward.out.sizes[1] = 16;
    forward.lse.sizes[2] = 15;
    expect_forward(cudaErrorInvalidValue, "lse");
    forward.lse.sizes[2] = 16;
    forward.q.sizes[1] = -1;
    expect_forward(cudaErrorInvalidValue, "q.sizes[1]=-1");
}

TEST_F(BackwardErrors, ShapesThatDoNotFit) {
    backward.lse.sizes[1] = 1;
    expect_backward(cudaErrorInvalidValue, "lse");
    backward.lse.sizes[1] = 2;
    backward.dk.sizes[1] = 15;
    expect_backward(cudaErrorInvalidValue, "dk");
}

TEST_F(Errors, HeadDimsThatNoKernelTakes) {
    for (const int64_t d : {int64_t(12), int64_t(264)}) {
        for (flash_attention_v2_tensor *of : {&forward.q, &forward.k, &forward.v, &forward.out}) {
            *of = tensor(of->data, kHalf, {1, 16, 2, d});
        }
        EXPECT_EQ(flash_attention_v2_run_forward(&forward, nullptr), cudaErrorInvalidValue)
            << d << ": " << words();
    }
}

TEST_F(Errors, HeadDimsThatThisBuildLacks) {
    for (const int d : {32, 64, 96, 128, 192, 256}) {
        if (flash_attention_v2_has_kernels(d, kHalf, 0)) { continue; }
        for (flash_attention_v2_tensor *of : {&forward.q, &forward.k, &forward.v, &forward.out}) {
            *of = tensor(of->data, kHalf, {1, 16, 2, d});
        }
        expect_forward(cudaErrorNotSupported, std::to_string(d).c_str());
        return;
    }
    GTEST_SKIP() << "this build has kernels for every head dim";
}

TEST_F(Errors, StridesThatNoKernelTakes) {
    forward.q.strides[3] = 2;
    expect_forward(cudaErrorInvalidValue, "q");
    forward.q.strides[3] = 1;
    forward.v.strides[1] += 1;  // rows at odd places
    expect_forward(cudaErrorInvalidValue, "v's rows");
    forward.v.strides[1] -= 1;
    forward.k.data = static_cast<char *>(forward.k.data) + 2;
    EXPECT_EQ(flash_attention_v2_run_forward(&forward, nullptr), cudaErrorInvalidValue);
    EXPECT_WORDS("k's rows");
}

TEST_F(Errors, ResultsWhoseElementsShareMemory) {
    forward.out.strides[1] = 0;
    expect_forward(cudaErrorInvalidValue, "out.strides[1]=0");
}

TEST_F(BackwardErrors, ResultsWhoseElementsShareMemory) {
    backward.dk.strides[2] = 0;
    expect_backward(cudaErrorInvalidValue, "dk.strides[2]=0");
}

TEST_F(Errors, AddressesBesideTheirElements) {
    forward.lse.data = static_cast<char *>(forward.lse.data) + 2;
    expect_forward(cudaErrorInvalidValue, "lse.data is not aligned");
}

TEST_F(Errors, SizesBeyondAnyMemory) {
    forward.q.sizes[0] = forward.q.sizes[1] = std::numeric_limits<int>::max();
    expect_forward(cudaErrorInvalidValue, "q has more elements");
}

TEST_F(Errors, PackedCallsWithoutTheirLongestLength) {
    for (auto *const array : {&forward.q, &forward.k, &forward.v, &forward.out}) {
        *array = tensor(array->data, kHalf, {16, 2, d_});
    }
    forward.lse = {};
    forward.cu_seqlens_q = forward.cu_seqlens_k = tensor(at(4), kInt, {2});
    expect_forward(cudaErrorInvalidValue, "max_seqlen_q is 0");
    forward.max_seqlen_q = 16;
    expect_forward(cudaErrorInvalidValue, "max_seqlen_k is 0");
}

TEST_F(BackwardErrors, AGradientOfABiasWithoutMemory) {
    backward.options.bias = backward.dbias = tensor(at(0), kHalf, {1, 2, 16, 16});
    backward.dbias.data = nullptr;
    expect_backward(cudaErrorInvalidValue, "dbias.data is null");
}

TEST_F(Errors, OptionsOutOfTheirRanges) {
    const flash_attention_v2_options right = forward.options;
    const float nan = std::numeric_limits<float>::quiet_NaN(),
                infinity = std::numeric_limits<float>::infinity();
    const auto wrong = [&](const char *name, auto flash_attention_v2_options::*field, auto value) {
        forward.options = right;
        forward.options.*field = value;
        expect_forward(cudaErrorInvalidValue, name);
    };
    for (const float value : {-1.f, nan, infinity}) {
        wrong("softmax_scale", &flash_attention_v2_options::softmax_scale, value);
        wrong("softcap", &flash_attention_v2_options::softcap, value);
        wrong("dropout", &flash_attention_v2_options::dropout, value);
    }
    wrong("dropout", &flash_attention_v2_options::dropout, 1.f);
    wrong("causal", &flash_attention_v2_options::causal, 2);
    wrong("window_left", &flash_attention_v2_options::window_left, -2);
    wrong("window_right", &flash_attention_v2_options::window_right, -7);
    wrong("split_size", &flash_attention_v2_options::split_size, -2);
    wrong("split_size", &flash_attention_v2_options::split_size, 100);
    wrong("seed_at", &flash_attention_v2_options::seed_at, static_cast<const int64_t *>(at(0)));
}

TEST_F(Errors, FieldsOfAnotherKindOfCall) {
    for (int32_t flash_attention_v2_forward_call::*const field :
        {&flash_attention_v2_forward_call::num_splits, &flash_attention_v2_forward_call::zero_gaps,
            &flash_attention_v2_forward_call::max_seqlen_q,
            &flash_attention_v2_forward_call::rotary_interleaved}) {
        forward.*field = 1;
        expect_forward(cudaErrorInvalidValue, "does not go with sequences of one length");
        forward.*field = 0;
    }
    forward.cu_seqlens_q = tensor(at(4), kInt, {2});
    expect_forward(cudaErrorInvalidValue, "cu_seqlens_q");
    forward.cu_seqlens_q = {};
    forward.cache_seqlens = tensor(at(4), kInt, {1});
    forward.options.dropout = 0.1f;
    expect_forward(cudaErrorInvalidValue, "dropout");
    forward.options.dropout = 0;
    forward.k_new = forward.k;
    expect_forward(cudaErrorInvalidValue, "v_new");
}

TEST_F(Errors, MasksAndBiasesThatDoNotFit) {
    forward.options.mask = tensor(at(4), kBool, {1, 2, 16, 17});
    EXPECT_NE(flash_attention_v2_run_forward(&forward, nullptr), cudaSuccess);
    EXPECT_WORDS("mask");
    forward.options.mask = tensor(at(4), kHalf, {1, 2, 16, 16});
    EXPECT_NE(flash_attention_v2_run_forward(&forward, nullptr), cudaSuccess);
    EXPECT_WORDS("mask");
    forward.options.mask = {};
    forward.options.alibi_slopes = tensor(at(4), kFloat, {3});
    expect_forward(cudaErrorInvalidValue, "options.alibi_slopes");
}

// Of every array, table and number that kernels read: one of them would end the context.
TEST_F(BackwardErrors, HostPointers) {
    if (devices() == 0) { GTEST_SKIP() << "no GPU"; }
    int reads = 0;
    ASSERT_EQ(cudaDeviceGetAttribute(&reads, cudaDevAttrPageableMemoryAccess, 0), cudaSuccess);
    if (reads) { GTEST_SKIP() << "this device reads the host's memory"; }
    alignas(256) static char host[kEach];
    const auto expect = [&](auto &call, auto run, const std::string &name) {
        EXPECT_EQ(run(&call, nullptr), cudaErrorInvalidValue) << name;
        EXPECT_EQ(words(), name + " lies in the host's memory, where the device cannot read it");
    };
    using Forward = flash_attention_v2_forward_call;
    using Backward = flash_attention_v2_backward_call;
    using Options = flash_attention_v2_options;
    const auto table = [&](int64_t numbers) { return tensor(at(4), kInt, {numbers}); };
    const Forward dense = forward;
    const Backward gradients = backward;
    Forward packed = forward, cached = forward, paged = forward;
    for (flash_attention_v2_tensor Forward::*const field :
        {&Forward::q, &Forward::k, &Forward::v, &Forward::out}) {
        packed.*field = tensor((forward.*field).data, kHalf, {16, 2, d_});
    }
    packed.lse = cached.lse = paged.lse = {};
    packed.cu_seqlens_q = packed.cu_seqlens_k = table(2);
    packed.seqused_k = packed.leftpad_k = table(1);
    packed.max_seqlen_q = packed.max_seqlen_k = 16;
    cached.cache_seqlens = cached.cache_batch_idx = cached.leftpad_k = table(1);
    cached.k_new = cached.v_new = tensor(at(5), kHalf, {1, 1, 2, d_});
    cached.rotary_cos = cached.rotary_sin = tensor(at(6), kHalf, {16, 8});
    paged.block_table = tensor(at(4), kInt, {1, 1});
    const std::tuple<const char *, const Forward *, flash_attention_v2_tensor Forward::*> arrays[] = {
        {"q", &dense, &Forward::q}, {"k", &dense, &Forward::k}, {"v", &dense, &Forward::v},
        {"out", &dense, &Forward::out}, {"lse", &dense, &Forward::lse},
        {"cu_seqlens_q", &packed, &Forward::cu_seqlens_q}, {"cu_seqlens_k", &packed, &Forward::cu_seqlens_k},
        {"seqused_k", &packed, &Forward::seqused_k}, {"leftpad_k", &packed, &Forward::leftpad_k},
        {"k", &cached, &Forward::k}, {"cache_seqlens", &cached, &Forward::cache_seqlens},
        {"k_new", &cached, &Forward::k_new}, {"v_new", &cached, &Forward::v_new},
        {"rotary_cos", &cached, &Forward::rotary_cos}, {"rotary_sin", &cached, &Forward::rotary_sin},
        {"cache_batch_idx", &cached, &Forward::cache_batch_idx},
        {"block_table", &paged, &Forward::block_table}};
    for (const auto &[name, call, field] : arrays) {
        forward = *call;
        (forward.*field).data = host;
        expect(forward, flash_attention_v2_run_forward, name);
    }
    for (const auto &[name, field] : {std::pair("dout", &Backward::dout), std::pair("dq", &Backward::dq),
             std::pair("lse", &Backward::lse), std::pair("dbias", &Backward::dbias)}) {
        backward = gradients;
        backward.options.bias = backward.dbias = tensor(at(0), kFloat, {1, 2, 16, 16});
        (backward.*field).data = host;
        expect(backward, flash_attention_v2_run_backward, name);
    }
    const auto of_options = [&](const char *name, auto set) {
        forward = dense;
        backward = gradients;
        set(forward.options);
        set(backward.options);
        expect(forward, flash_attention_v2_run_forward, std::string("options.") + name);
        expect(backward, flash_attention_v2_run_backward, std::string("options.") + name);
    };
    of_options("alibi_slopes", [&](Options &options) { options.alibi_slopes = tensor(host, kFloat, {2}); });
    of_options("mask", [&](Options &options) { options.mask = tensor(host, kBool, {16, 16}); });
    of_options("bias", [&](Options &options) { options.bias = tensor(host, kHalf, {16, 16}); });
    of_options("learnable_sink", [&](Options &options) { options.learnable_sink = host; });
    for (const bool seed : {true, false}) {
        of_options(seed ? "seed_at" : "offset_at", [&](Options &options) {
            options.dropout = 0.5f;
            const auto *const there = static_cast<const int64_t *>(at(4));
            options.seed_at = seed ? reinterpret_cast<const int64_t *>(host) : there;
            options.offset_at = seed ? there : reinterpret_cast<const int64_t *>(host);
        });
    }
    forward = dense;
    forward.workspace = host;
    forward.workspace_size = sizeof(host);
    expect(forward, flash_attention_v2_run_forward, "workspace");
    forward = dense;
    EXPECT_EQ(flash_attention_v2_run_forward(&forward, nullptr), cudaSuccess) << words();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "the context has ended";
}

// The caller's own, not those of another function or of a kernel.
TEST_F(Errors, NameTheArgumentThatIsWrong) {
    const auto rows = [&](int64_t b, int64_t s) { return tensor(at(5), kHalf, {b, s, 2, d_}); };
    const auto numbers = [&](int64_t count) { return tensor(at(4), kInt, {count}); };
    const auto caches = [&](auto &call) {
        call.lse = {};
        call.cache_seqlens = numbers(1);
    };
    using Call = flash_attention_v2_forward_call;
    const std::pair<std::function<void(Call &)>, const char *> wrong[] = {
        {[&](Call &c) { caches(c), c.k_new = rows(1, 2), c.v_new = rows(1, 3); },
            "v_new must have shape (batch_size, seqlen_new, num_heads_k, head_size)"},
        {[&](Call &c) { caches(c), c.k_new = c.v_new = rows(1, 17); }, "k_new has 17 tokens"},
        {[&](Call &c) { c.lse = {}, c.k_new = c.v_new = rows(1, 2); },
            "k_new is given without cache_seqlens"},
        {[&](Call &c) { c.lse = {}, c.cache_seqlens = numbers(2); }, "cache_seqlens must have shape"},
        {[&](Call &c) { c.lse = {}, c.cache_seqlens = tensor(at(4), kFloat, {1}); },
            "cache_seqlens must have dtype int32"},
        {[&](Call &c) { caches(c), c.v = rows(1, 15); },
            "v must have shape (batch_size_cache, seqlen_cache, num_heads_k, head_size)"},
        {[&](Call &c) { caches(c), c.v.dtype = kBfloat; }, "query and v must have the same dtype"},
        {[&](Call &c) { caches(c), c.leftpad_k = numbers(3); }, "leftpad_k must have shape"},
        {[&](Call &c) { caches(c), c.rotary_cos = c.rotary_sin = tensor(at(6), kHalf, {16, 8}); },
            "rotary_cos is given without k_new"},
        {[&](Call &c) { c.options.mask = tensor(at(4), kHalf, {16, 16}); }, "options.mask has dtype"},
        {[&](Call &c) { c.options.bias = tensor(at(4), kHalf, {16, 17}); }, "options.bias has shape"},
        {[&](Call &c) { c.options.alibi_slopes = tensor(at(4), kFloat, {3}); },
            "options.alibi_slopes must have shape [2] or [1, 2]; it has [3]"},
        {[&](Call &c) { c.options.learnable_sink = at(4), c.options.learnable_sink_dtype = kInt; },
            "options.learnable_sink has dtype"},
        {[&](Call &c) { c.options.learnable_sink = at(4), c.options.dropout = 0.5f; },
            "options.learnable_sink does not go with options.dropout"},
    };
    const Call right = forward;
    for (const auto &[make, said] : wrong) {
        forward = right;
        make(forward);
        EXPECT_NE(flash_attention_v2_run_forward(&forward, nullptr), cudaSuccess) << said;
        EXPECT_EQ(words().rfind(said, 0), 0u) << "words: " << words() << "; not " << said;
    }
}

TEST_F(Errors, AreFoundBeforeAGpuIsLookedFor) {
    const auto right = forward;
    forward.workspace = static_cast<char *>(at(5)) + 16;
    EXPECT_EQ(flash_attention_v2_run_forward(&forward, nullptr), cudaErrorInvalidValue);
    EXPECT_WORDS("workspace must begin at a multiple of 256 bytes");
    forward = right;
    forward.lse = {};
    forward.workspace = at(5);
    forward.workspace_size = 64;
    EXPECT_EQ(flash_attention_v2_run_forward(&forward, nullptr), cudaErrorInvalidValue);
    EXPECT_WORDS("workspace_size=64 is too small");
    forward = right;
    forward.options.split_size = 64;
    if (d_ <= 128) { expect_forward(cudaErrorInvalidValue, "split_size=64 is not a multiple of 128"); }
    // The short form.
    half *const some = static_cast<half *>(at(0));
    const FlashAttentionV2Config config{1, 16, 2, d_, false, 0.f, 0};
    EXPECT_EQ(flash_attention_v2_forward(some, some, some + 1, some, some, config), cudaErrorInvalidValue);
    EXPECT_WORDS("v must begin at a multiple of 16 bytes");
    const int most = std::numeric_limits<int>::max();
    EXPECT_EQ(flash_attention_v2_forward(some, some, some, some, some, {most, most, most, d_, false, 0.f, 0}),
        cudaErrorInvalidValue);
    EXPECT_WORDS("q has more elements than memory could hold");
    if (!flash_attention_v2_has_kernels(256, kHalf, 0)) {
        EXPECT_EQ(flash_attention_v2_forward(some, some, some, some, some, {1, 16, 2, 256, false, 0.f, 0}),
            cudaErrorNotSupported);
        EXPECT_WORDS("head_dim=256");
    }
    int device = 0;
    forward.options.split_size = -2;
    EXPECT_EQ(flash_attention_v2_forward_on_devices(&forward, &device, nullptr, 1), cudaErrorInvalidValue);
    EXPECT_WORDS("split_size=-2");
}

TEST_F(Errors, AreForgottenByTheNextCallThatSucceeds) {
    EXPECT_EQ(flash_attention_v2_run_forward(nullptr, nullptr), cudaErrorInvalidValue);
    EXPECT_FALSE(words().empty());
    EXPECT_EQ(flash_attention_v2_forward_defaults(&forward, sizeof(forward)), cudaSuccess);
    EXPECT_TRUE(words().empty());
}

TEST_F(Errors, WithoutAGpuEveryRightCallSaysSo) {
    if (devices() > 0) { GTEST_SKIP() << "there is a GPU"; }
    EXPECT_EQ(flash_attention_v2_init(), cudaErrorNoDevice);
    EXPECT_FALSE(words().empty());
    size_t bytes = 0;
    EXPECT_EQ(flash_attention_v2_forward_workspace(&forward, &bytes), cudaErrorNoDevice);
    EXPECT_EQ(flash_attention_v2_cleanup(), cudaSuccess) << words();
    half *const some = static_cast<half *>(at(0));
    EXPECT_EQ(flash_attention_v2_forward(some, some, some, some, some, {1, 16, 2, d_, false, 0.f, 0}),
        cudaErrorNoDevice);
}

// flash_attention_v2.h

TEST(Configurations, EachFieldHasItsRange) {
    const FlashAttentionV2Config right{1, 32, 4, 16, false, 0.f, 0};
    EXPECT_TRUE(is_config_valid(right));
    const auto wrong = [&](auto FlashAttentionV2Config::*field, auto value, const char *name) {
        FlashAttentionV2Config config = right;
        config.*field = value;
        EXPECT_FALSE(is_config_valid(config)) << name << "=" << value;
        EXPECT_WORDS(name);
        half some;
        EXPECT_EQ(
            flash_attention_v2_forward(&some, &some, &some, &some, &some, config), cudaErrorInvalidValue);
        EXPECT_WORDS(name);
        EXPECT_EQ(flash_attention_v2_backward(
                      &some, &some, &some, &some, &some, &some, &some, &some, &some, config),
            cudaErrorInvalidValue);
        EXPECT_WORDS(name);
    };
    for (const int value : {0, -1, std::numeric_limits<int>::min()}) {
        wrong(&FlashAttentionV2Config::batch_size, value, "batch_size");
        wrong(&FlashAttentionV2Config::seq_len, value, "seq_len");
        wrong(&FlashAttentionV2Config::num_heads, value, "num_heads");
        wrong(&FlashAttentionV2Config::head_dim, value, "head_dim");
    }
    for (const int value : {4, 12, 257, 264}) { wrong(&FlashAttentionV2Config::head_dim, value, "head_dim"); }
    for (const float value : {-0.1f, 1.f, 2.f, std::numeric_limits<float>::quiet_NaN()}) {
        wrong(&FlashAttentionV2Config::dropout_rate, value, "dropout_rate");
    }
    for (const int value : {8, 16, 32, 256}) {
        FlashAttentionV2Config config = right;
        config.head_dim = value;
        EXPECT_TRUE(is_config_valid(config)) << value;
    }
}

TEST(Configurations, EachPointerMustBeGiven) {
    const FlashAttentionV2Config config{1, 32, 4, 16, false, 0.f, 0};
    half some[1];
    const char *const names[] = {"q", "k", "v", "o", "l", "do_grad", "dq", "dk", "dv"};
    for (int missing = 0; missing < 9; ++missing) {
        half *p[9];
        for (int i = 0; i < 9; ++i) { p[i] = i == missing ? nullptr : some; }
        const std::string said = std::string(names[missing]) + " is null";
        if (missing < 5) {
            EXPECT_EQ(
                flash_attention_v2_forward(p[0], p[1], p[2], p[3], p[4], config), cudaErrorInvalidValue);
            EXPECT_EQ(words(), said);
        }
        EXPECT_EQ(flash_attention_v2_backward(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], config),
            cudaErrorInvalidValue);
        EXPECT_EQ(words(), said);
    }
}

TEST(Configurations, ALayoutThatIsNoneIsRefused) {
    EXPECT_EQ(flash_attention_v2_set_layout(FlashAttentionV2Layout(7)), cudaErrorInvalidValue);
    EXPECT_WORDS("layout=7");
}

TEST(Queries, OfKernelsAnswerWithoutAGpu) {
    EXPECT_EQ(flash_attention_v2_has_kernels(33, kHalf, 0), 0);
    EXPECT_EQ(flash_attention_v2_has_kernels(0, kHalf, 0), 0);
    EXPECT_EQ(flash_attention_v2_has_kernels(64, kFloat, 0), 0);
    EXPECT_EQ(flash_attention_v2_has_kernels(64, kHalf, 2), 0);
    const std::string kernels = flash_attention_v2_kernels();
    EXPECT_NE(kernels.find("hdim"), std::string::npos) << kernels;
    EXPECT_NE(kernels.back(), '\n');
    // A head dim is served where its kernels are named.
    for (const int d : {32, 64, 96, 128, 192, 256}) {
        const std::string named = "hdim" + std::to_string(d) + "_fp16";
        EXPECT_EQ(flash_attention_v2_has_kernels(d, kHalf, 1) == 1,
            kernels.find("bwd_" + named) != std::string::npos);
    }
    EXPECT_STREQ(flash_attention_v2_version(), FLASH_ATTENTION_V2_VERSION);
    std::string numbers = std::to_string(FLASH_ATTENTION_V2_VERSION_MAJOR);
    for (const int number : {FLASH_ATTENTION_V2_VERSION_MINOR, FLASH_ATTENTION_V2_VERSION_PATCH}) {
        numbers += "." + std::to_string(number);
    }
    EXPECT_EQ(numbers, FLASH_ATTENTION_V2_VERSION);
}

}  // namespace

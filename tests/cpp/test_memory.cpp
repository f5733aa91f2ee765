// Workspaces: how large they are, that no call leaves them, and who else's memory a call uses.

#include <algorithm>
#include <climits>
#include <random>
#include <vector>

#include "harness.h"

using namespace harness;

namespace {

class Workspaces : public OnGpu {};

Shape shape_with_workspace(int which) {
    Shape shape;
    shape.len_q = which == 0 ? 1 : 40;
    shape.len_k = emulated() ? 300 : 4096;
    shape.h_k = which == 2 ? 1 : 2;
    shape.split_size = which == 0 ? 128 : 0;
    shape.dropout = which == 3 ? 0.1f : 0.f;
    return shape;
}

TEST_F(Workspaces, ACallStaysInTheOneItIsGiven) {
    size_t largest = 0;
    for (int which = 0; which < 4; ++which) {
        const Shape shape = shape_with_workspace(which);
        NEEDS_KERNELS(shape, true);
        const Inputs inputs = Inputs::draw(shape);
        Calls calls(inputs);
        SUCCEEDS(calls.run_forward());
        SUCCEEDS(calls.run_backward());
        const Results own = calls.results();
        SUCCEEDS(flash_attention_v2_forward_workspace(&calls.forward, &calls.forward.workspace_size));
        SUCCEEDS(flash_attention_v2_backward_workspace(&calls.backward, &calls.backward.workspace_size));
        largest = std::max(largest, calls.forward.workspace_size);
        EXPECT_GT(calls.backward.workspace_size, 0u);
        const Array forward(calls.forward.workspace_size), backward(calls.backward.workspace_size);
        forward.fill(0xff);
        backward.fill(0xff);
        calls.forward.workspace = calls.forward.workspace_size > 0 ? forward.data() : nullptr;
        calls.backward.workspace = backward.data();
        calls.poison();
        SUCCEEDS(calls.run_forward());
        SUCCEEDS(calls.run_backward());
        const Results given = calls.results();
        EXPECT_EQ(given.out, own.out);
        EXPECT_EQ(given.dk, own.dk);
        EXPECT_EQ(given.dv, own.dv);
    }
    EXPECT_GT(largest, 0u) << "no forward call here takes a workspace, so this shows nothing";
}

TEST_F(Workspaces, AByteLessIsRefused) {
    for (int which = 0; which < 4; ++which) {
        const Shape shape = shape_with_workspace(which);
        NEEDS_KERNELS(shape, true);
        const Inputs inputs = Inputs::draw(shape);
        Calls calls(inputs);
        SUCCEEDS(calls.run_forward());
        size_t bytes = 0;
        SUCCEEDS(flash_attention_v2_backward_workspace(&calls.backward, &bytes));
        const Array workspace(bytes);
        calls.backward.workspace = workspace.data();
        calls.backward.workspace_size = bytes - 1;
        EXPECT_EQ(calls.run_backward(), cudaErrorInvalidValue);
        EXPECT_NE(std::string(flash_attention_v2_last_error()).find("workspace_size"), std::string::npos);
        SUCCEEDS(flash_attention_v2_forward_workspace(&calls.forward, &bytes));
        if (bytes == 0) { continue; }
        calls.forward.workspace = workspace.data();
        calls.forward.workspace_size = bytes - 1;
        EXPECT_EQ(calls.run_forward(), cudaErrorInvalidValue);
    }
}

TEST_F(Workspaces, OneAtAnOddPlaceIsRefused) {
    const Shape shape = shape_with_workspace(0);
    NEEDS_KERNELS(shape, true);
    const Inputs inputs = Inputs::draw(shape);
    Calls calls(inputs);
    const Array workspace(size_t(1) << 20);
    calls.backward.workspace = workspace.as<char>() + 8;
    calls.backward.workspace_size = (size_t(1) << 20) - 8;
    EXPECT_EQ(calls.run_backward(), cudaErrorInvalidValue);
    EXPECT_NE(std::string(flash_attention_v2_last_error()).find("256"), std::string::npos);
}

TEST_F(Workspaces, TheQueryNeedsNoMemoryYet) {
    const Shape shape = shape_with_workspace(0);
    NEEDS_KERNELS(shape, true);
    const Inputs inputs = Inputs::draw(shape);
    Calls calls(inputs);
    size_t with = 0, without = 1;
    SUCCEEDS(flash_attention_v2_forward_workspace(&calls.forward, &with));
    for (flash_attention_v2_tensor *of :
        {&calls.forward.q, &calls.forward.k, &calls.forward.v, &calls.forward.out, &calls.forward.lse}) {
        of->data = nullptr;
    }
    SUCCEEDS(flash_attention_v2_forward_workspace(&calls.forward, &without));
    EXPECT_EQ(with, without);
}

// Of a call of one sequence, whose arrays need no memory for that.
size_t backward_workspace(int64_t length) {
    const int64_t d = built_head_dim(), h = 2;
    flash_attention_v2_backward_call call;
    EXPECT_EQ(flash_attention_v2_backward_defaults(&call, sizeof(call)), cudaSuccess);
    const flash_attention_v2_tensor rows = tensor(nullptr, kHalf, {1, length, h, d});
    call.q = call.k = call.v = call.out = call.dout = call.dq = call.dk = call.dv = rows;
    call.lse = tensor(nullptr, kFloat, {1, h, length});
    size_t bytes = 0;
    EXPECT_EQ(flash_attention_v2_backward_workspace(&call, &bytes), cudaSuccess)
        << flash_attention_v2_last_error();
    return bytes;
}

TEST_F(Workspaces, GrowWithTheLengthAndNotWithItsSquare) {
    if (built_head_dim() == 0) { GTEST_SKIP() << "this build has no head dim with both passes in float16"; }
    const size_t few = backward_workspace(1 << 10), many = backward_workspace(1 << 20);
    EXPECT_GT(few, 0u);
    EXPECT_LE(many, few << 10);
    EXPECT_GE(many, few << 9);
}

// Of 32 queries, packed with so many keys or on a cache in pages for so many, as a call of the longest key
// length names it.
size_t forward_workspace(bool packed, int64_t keys, int64_t named) {
    constexpr int64_t h = 2, page = 16;
    const int64_t d = built_head_dim();
    flash_attention_v2_forward_call call;
    EXPECT_EQ(flash_attention_v2_forward_defaults(&call, sizeof(call)), cudaSuccess);
    call.options.split_size = 128;
    if (packed) {
        call.q = call.out = tensor(nullptr, kHalf, {32, h, d});
        call.k = call.v = tensor(nullptr, kHalf, {keys, h, d});
        call.cu_seqlens_q = call.cu_seqlens_k = tensor(nullptr, kInt, {2});
        call.max_seqlen_q = call.max_seqlen_k = int32_t(named);
        call.lse = tensor(nullptr, kFloat, {h, 32});
    } else {
        call.q = call.out = tensor(nullptr, kHalf, {1, 32, h, d});
        call.k = call.v = tensor(nullptr, kHalf, {keys / page + 1, page, h, d});
        call.cache_seqlens = tensor(nullptr, kInt, {1});
        call.block_table = tensor(nullptr, kInt, {1, named / page + 1});
        call.lse = tensor(nullptr, kFloat, {1, h, 32});
    }
    size_t bytes = 0;
    EXPECT_EQ(flash_attention_v2_forward_workspace(&call, &bytes), cudaSuccess)
        << flash_attention_v2_last_error() << " for " << named;
    return bytes;
}

TEST_F(Workspaces, AreBoundedWhateverLengthACallNames) {
    if (built_head_dim() == 0) { GTEST_SKIP() << "this build has no head dim with both passes in float16"; }
    constexpr int64_t keys = 2000, most = INT32_MAX;
    const size_t few = forward_workspace(true, keys, keys);
    EXPECT_GT(few, 0u);
    std::mt19937_64 random(1);
    std::vector<int64_t> lengths{int64_t(1) << 24, int64_t(1) << 30, most - 1023, most - 127, most};
    for (int i = 0; i < 200; ++i) { lengths.push_back(keys + int64_t(random() % (most - keys))); }
    for (const int64_t named : lengths) {
        EXPECT_EQ(forward_workspace(true, keys, named), few) << named;
        EXPECT_LE(forward_workspace(false, keys, named), size_t(560) << 20) << named;
    }
}

class State : public OnRealGpu {};

TEST_F(State, CallsLeaveTheCallersDeviceAndLastErrorAlone) {
    const Inputs inputs = Inputs::draw({});
    NEEDS_KERNELS(inputs.shape, true);
    const Calls calls(inputs);
    int before = -1, after = -2;
    SUCCEEDS(cudaGetDevice(&before));
    EXPECT_EQ(cudaSetDevice(1 << 20), cudaErrorInvalidDevice);  // the caller's own mistake, not looked at yet
    SUCCEEDS(calls.run_forward());
    SUCCEEDS(calls.run_backward());
    EXPECT_EQ(flash_attention_v2_run_forward(nullptr, nullptr), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    SUCCEEDS(cudaGetDevice(&after));
    EXPECT_EQ(before, after);
    EXPECT_EQ(flash_attention_v2_run_forward(nullptr, nullptr), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "a refused call is no CUDA error of the caller's";
}

TEST_F(State, CleanupGivesMemoryBack) {
    Shape shape;
    shape.len_q = shape.len_k = 8192;
    shape.h = shape.h_k = 16;
    NEEDS_KERNELS(shape, true);
    const Inputs inputs = Inputs::draw(shape);
    const Calls calls(inputs);
    SUCCEEDS(calls.run_forward());
    SUCCEEDS(calls.run_backward());
    SUCCEEDS(cudaDeviceSynchronize());
    size_t held = 0, whole = 0, free_after = 0;
    SUCCEEDS(cudaMemGetInfo(&held, &whole));
    SUCCEEDS(flash_attention_v2_cleanup());
    SUCCEEDS(cudaDeviceSynchronize());
    SUCCEEDS(cudaMemGetInfo(&free_after, &whole));
    EXPECT_GE(free_after, held + (size_t(16) << 20)) << "sums of dq take 16 MiB here";
}

}  // namespace

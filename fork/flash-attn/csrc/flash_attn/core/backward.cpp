// Backward calls: dense and packed.

#include <algorithm>

#include "bias_gradient.h"
#include "call.h"
#include "fork_order.h"
#include "fork_runtime.h"
#include "fork_split.h"
#include "launch.h"
#include "params.h"
#include "scores.h"
#include "small_kernels.h"
#include "values.h"

namespace FLASH_NAMESPACE {
namespace core {

namespace {

// Tokens so many elements apart or more are too far for the kernels' steps, of up to 128 tokens in 32 bits.
constexpr int64_t kFar = (int64_t(1) << 31) / 128;

// What the kernels step through, a block of rows at a time. flash_attn/fork_layout.py copies what lies so.
void check_steps(const char *name, const Tensor &tensor, int64_t seqlen_q) {
    FORK_CHECK_VALUE(seqlen_q <= 1 || tensor.stride(-3) < kFar, name, "'s tokens lie ", tensor.stride(-3),
        " elements apart; the backward pass steps over less than ", kFar, ": make it contiguous");
}

bool same_shape(const Tensor &tensor, const Tensor &other) {
    bool same = tensor.dims == other.dims;
    for (int i = 0; same && i < other.dims; ++i) { same = tensor.sizes[i] == other.sizes[i]; }
    return same;
}

void check_like(const char *name, const Tensor &tensor, const char *other_name, const Tensor &other) {
    FORK_CHECK(tensor.dtype == other.dtype, name, " must have the same dtype as ", other_name, "; it has ",
        tensor.dtype);
    check_device(name, tensor, other.device);
    FORK_CHECK(same_shape(tensor, other), name, " must have shape ", other.shape(), ", that of ", other_name,
        "; it has ", tensor.shape());
    check_rows(name, tensor);
}

// Kernels read an lse, and what lies as it does, in the order of its rows.
void check_lse(const char *name, const Tensor &rows, const Tensor &q) {
    FORK_CHECK(rows.dtype == Dtype::fp32, name, " must have dtype fp32; it has ", rows.dtype);
    check_device(name, rows, q.device);
    int64_t count = 1;
    for (int i = 0; i < q.dims - 1; ++i) { count *= q.sizes[i]; }
    FORK_CHECK(rows.elements() == count, name, " must have a number for each head of each query, which are ",
        count, "; it has shape ", rows.shape());
    FORK_CHECK(rows.contiguous(), name, " must be contiguous; its shape is ", rows.shape());
}

// Of both kinds, once q, k and v have their ranks.
void check_gradients(
    const Gradients &call, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &lse) {
    check_device("q", q, q.device);
    check_dtypes(q, {{"k", &k}, {"v", &v}, {"out", &call.out}, {"dout", &call.dout}});
    check_rows("q", q);
    check_rows("k", k);
    check_device("k", k, q.device);
    check_like("v", v, "k", k);
    check_like("out", call.out, "q", q);
    check_like("dout", call.dout, "q", q);
    check_lse(call.names->lse, lse, q);
    if (call.lse_gradient.given()) { check_lse("the gradient of softmax_lse", call.lse_gradient, q); }
    if (call.dq.given()) { check_like("dq", call.dq, "q", q); }
    if (call.dk.given()) { check_like("dk", call.dk, "k", k); }
    if (call.dv.given()) { check_like("dv", call.dv, "v", v); }
    check_options(call);
    FORK_CHECK(call.p_dropout == 0.f || call.rng_state != nullptr,
        "the backward pass of a call with dropout needs the random state that its forward call gave "
        "(rng_state)");
}

// Everything between a call's own sizes and the launch.
struct Problem {
    Sizes4 sizes;
    ScoreSizes scores;
    int64_t rows, dq_rows;  // of queries, and of dq's sums, all sequences together
    int total_q, total_k;   // of packed calls
    const int *cu_seqlens_q, *cu_seqlens_k;
    bool zero_tensors;
};

void set_gradients(Flash_bwd_params &params, const Gradients &call, const Rows &dk, const Rows &dv) {
    const Rows dout = rows_of(call.dout), dq = rows_of(call.dq);
    params.do_ptr = dout.data;
    params.dq_ptr = dq.data;
    params.dk_ptr = dk.data;
    params.dv_ptr = dv.data;
    params.do_batch_stride = dout.batch;
    params.dq_batch_stride = dq.batch;
    params.dk_batch_stride = dk.batch;
    params.dv_batch_stride = dv.batch;
    params.do_row_stride = dout.row;
    params.dq_row_stride = dq.row;
    params.dk_row_stride = dk.row;
    params.dv_row_stride = dv.row;
    params.do_head_stride = dout.head;
    params.dq_head_stride = dq.head;
    params.dk_head_stride = dk.head;
    params.dv_head_stride = dv.head;
}

// dk or dv of each head of queries, contiguous: k's shape with h heads.
Rows heads_rows(void *data, const Tensor &k, int h) {
    const int64_t row = int64_t(h) * k.size(-1);
    return {data, k.dims == 4 ? row * k.size(1) : 0, row, k.size(-1)};
}

// Of keys, at least 64 in each: places in fork_order.h's walk are ints, and are some more than blocks.
constexpr int64_t kMostBlocks = int64_t(1) << 30;

void run_gradients(Gradients &call, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &lse,
    const Problem &problem, const Host &host) {
    const auto &[b, named_q, named_k, h, h_k, d] = problem.sizes;
    const bool packed = problem.cu_seqlens_q != nullptr;
    // No sequence is longer than all; a mask and a bias are as wide as the call says.
    const bool names = !packed || call.attn_mask.given() || call.attn_bias.given();
    const int seqlen_q = names ? named_q : std::min(named_q, problem.total_q),
              seqlen_k = names ? named_k : std::min(named_k, problem.total_k);
    check_grid(b, h);
    FORK_CHECK(call.dq.given() && call.dk.given() && call.dv.given() && call.softmax_d.given()
            && call.softmax_d.dtype == Dtype::fp32 && call.softmax_d.contiguous(),
        "dq, dk, dv and softmax_d must be given");
    if (b == 0 || named_q == 0 || named_k == 0 || q.elements() == 0 || k.elements() == 0) {
        if (host.measured != nullptr) { return; }
        for (const Tensor *tensor : {&call.dq, &call.dk, &call.dv, &call.dk_heads, &call.dv_heads,
                 &call.softmax_d, &call.bias_gradient}) {
            if (tensor->given()) { fill(*tensor, 0.f, host.stream); }
        }
        return;
    }
    check_steps("q", q, seqlen_q);
    check_steps("out", call.out, seqlen_q);
    check_steps("dout", call.dout, seqlen_q);
    check_steps("dq", call.dq, seqlen_q);
    const bool ordered = fork_mode::of_call(call.split_size).enabled && call.p_dropout == 0.f;
    const bool deterministic = call.deterministic && !ordered;
    FORK_CHECK_VALUE(!ordered || int64_t(b) * h * ((int64_t(seqlen_k) + 63) / 64) <= kMostBlocks,
        "max_seqlen_k=", named_k, " is too long for gradients of ", b, " sequences of ", h,
        " heads with the mode on: 32 bits do not count their blocks of keys. Name the longest sequence's "
        "length.");
    if (call.causal) { call.window_right = 0; }
    const int left = call.window_left, right = call.window_right;
    if (!ordered && left >= named_k) { call.window_left = -1; }
    if (!ordered && right >= named_k) { call.window_right = -1; }

    Flash_bwd_params params{};
    set_params(params, call, problem.sizes, q.dtype == Dtype::bf16, rows_of(q), rows_of(k), rows_of(v),
        rows_of(call.out), lse.as<float>());
    params.cu_seqlens_q = const_cast<int *>(problem.cu_seqlens_q);
    params.cu_seqlens_k = const_cast<int *>(problem.cu_seqlens_k);
    params.unpadded_lse = packed;
    params.total_q = problem.total_q;
    params.fork_bwd.total_k = problem.total_k;
    params.deterministic = deterministic;
    params.dsoftmax_sum = call.softmax_d.data;
    params.rng_state = call.rng_state;
    params.fork_bwd.lse_gradient = call.lse_gradient.given() ? call.lse_gradient.as<float>() : nullptr;
    if (ordered) { fork_split::set_windows(params, left, right); }
    set_scores(params, call, problem.scores, 1);
    set_alibi(params, call);

    BiasGradient bias(params, call, problem.scores);
    params.seqlen_q = seqlen_q;
    params.seqlen_k = seqlen_k;
    Scratch scratch;
    bias.reserve(scratch);
    const int64_t dq_elements = problem.dq_rows * h * params.d_rounded;
    // Upstream's deterministic sums: thread blocks that run side by side have a buffer each.
    const int buffers = deterministic ? (gpu_facts().multiprocessors + b * h - 1) / (b * h) : 1;
    const size_t dq_sums = scratch.reserve(buffers * dq_elements * sizeof(float));
    params.dq_accum_split_stride = deterministic ? dq_elements : 0;
    const bool grouped = h != h_k, own_heads = grouped && call.dk_heads.given();
    const int64_t heads_bytes = grouped ? k.elements() / h_k * h * bytes_of(q.dtype) : 0;
    const size_t dk_heads = scratch.reserve(own_heads ? 0 : heads_bytes),
                 dv_heads = scratch.reserve(own_heads ? 0 : heads_bytes);
    params.fork_bwd.dq_turns_head_stride = ordered ? problem.rows / fork_order::kRows + b + 1 : 0;
    const int64_t turns_bytes = ordered ? (h * params.fork_bwd.dq_turns_head_stride + 2) * sizeof(int) : 0;
    const size_t turns = scratch.reserve(turns_bytes);
    scratch.allocate(host);
    if (host.measured != nullptr) { return; }

    params.dq_accum_ptr = scratch.at(dq_sums);
    if (deterministic) {
        FORK_CHECK_CUDA(
            cudaMemsetAsync(params.dq_accum_ptr, 0, buffers * dq_elements * sizeof(float), host.stream));
    }
    if (ordered) {
        params.fork_bwd.wait_limit = fork_mode::wait_limit();
        params.fork_bwd.dq_turns = scratch.at<int>(turns);
        params.fork_bwd.dq_ticket = params.fork_bwd.dq_turns + h * params.fork_bwd.dq_turns_head_stride;
        FORK_CHECK_CUDA(cudaMemsetAsync(params.fork_bwd.dq_turns, 0, turns_bytes, host.stream));
    }
    void *const dk_of_heads = own_heads ? call.dk_heads.data : scratch.at(dk_heads);
    void *const dv_of_heads = own_heads ? call.dv_heads.data : scratch.at(dv_heads);
    set_gradients(params, call, grouped ? heads_rows(dk_of_heads, k, h) : rows_of(call.dk),
        grouped ? heads_rows(dv_of_heads, k, h) : rows_of(call.dv));
    bias.begin(params, scratch, host.stream);

    if (problem.zero_tensors) {
        for (const Tensor *tensor : {&call.dq, &call.dk, &call.dv, &call.softmax_d}) {
            fill(*tensor, 0.f, host.stream);
        }
        if (grouped) {
            FORK_CHECK_CUDA(cudaMemsetAsync(dk_of_heads, 0, heads_bytes, host.stream));
            FORK_CHECK_CUDA(cudaMemsetAsync(dv_of_heads, 0, heads_bytes, host.stream));
        }
    }
    run_backward(params, host.stream);
    if (grouped && !own_heads) {
        sum_groups(call.dk, dk_of_heads, h, host.stream);
        sum_groups(call.dv, dv_of_heads, h, host.stream);
    }
    bias.finish(host.stream);
}

}  // namespace

void check(const Backward &call) {
    const Tensor &q = call.q, &k = call.k, &v = call.v;
    check_rank("q", q, 4, "(batch_size, seqlen_q, num_heads, head_size)");
    check_rank("k", k, 4, "(batch_size, seqlen_k, num_heads_k, head_size)");
    check_rank("v", v, 4, "(batch_size, seqlen_k, num_heads_k, head_size)");
    const int64_t batch_size = q.size(0), num_heads = q.size(2), head_size = q.size(3), seqlen_k = k.size(1),
                  num_heads_k = k.size(2);
    check_gradients(call, q, k, v, call.lse);
    check_heads(call, q.device, batch_size, num_heads, num_heads_k, head_size);
    check_kernels(q, true);
    check_tokens(call, "q", q.size(1), q.size(1), "k", seqlen_k, seqlen_k);
    FORK_CHECK_SHAPE("k", k, batch_size, seqlen_k, num_heads_k, head_size);
    check_scores(call, q, {batch_size, num_heads, num_heads_k, q.size(1), seqlen_k, false});
}

void run(const Backward &given, const Host &host) {
    Backward call = given;
    check(call);
    const OnGpu guard(call.q.device.index);
    check_gpu();
    const int b = call.q.size(0), seqlen_q = call.q.size(1), h = call.q.size(2), d = call.q.size(3),
              seqlen_k = call.k.size(1), h_k = call.k.size(2);
    const int64_t rows = int64_t(b) * rounded(seqlen_q, 128);
    run_gradients(call, call.q, call.k, call.v, call.lse,
        {{b, seqlen_q, seqlen_k, h, h_k, d}, {b, h, h_k, seqlen_q, seqlen_k, false}, rows, rows, 0, 0,
            nullptr, nullptr, false},
        host);
}

void check(const VarlenBackward &call) {
    const Tensor &q = call.q, &k = call.k, &v = call.v, &cu_seqlens_q = call.cu_seqlens_q,
                 &cu_seqlens_k = call.cu_seqlens_k;
    check_rank("q", q, 3, "(total_q, num_heads, head_size)");
    check_rank("k", k, 3, "(total_k, num_heads_k, head_size)");
    check_rank("v", v, 3, "(total_k, num_heads_k, head_size)");
    check_table("cu_seqlens_q", cu_seqlens_q, q.device);
    check_table("cu_seqlens_k", cu_seqlens_k, q.device);
    const int64_t batch_size = sequences(cu_seqlens_q), num_heads = q.size(1), head_size = q.size(2),
                  total_k = k.size(0), num_heads_k = k.size(1);
    check_gradients(call, q, k, v, call.lse);
    check_heads(call, q.device, batch_size, num_heads, num_heads_k, head_size);
    check_kernels(q, true);
    FORK_CHECK_SHAPE("cu_seqlens_q", cu_seqlens_q, batch_size + 1);
    FORK_CHECK_SHAPE("cu_seqlens_k", cu_seqlens_k, batch_size + 1);
    FORK_CHECK_VALUE(call.max_seqlen_q >= 0 && call.max_seqlen_k >= 0,
        "max_seqlen_q and max_seqlen_k must not be negative");
    const int64_t total_q = q.size(0);
    check_tokens(call, "q", total_q, std::min<int64_t>(total_q, call.max_seqlen_q), "k", total_k,
        std::min<int64_t>(total_k, call.max_seqlen_k));
    FORK_CHECK_SHAPE("k", k, total_k, num_heads_k, head_size);
    check_scores(call, q, {batch_size, num_heads, num_heads_k, q.size(0), call.max_seqlen_k, true});
}

void run(const VarlenBackward &given, const Host &host) {
    VarlenBackward call = given;
    check(call);
    const OnGpu guard(call.q.device.index);
    check_gpu();
    const int b = sequences(call.cu_seqlens_q), total_q = call.q.size(0), h = call.q.size(1),
              d = call.q.size(2), total_k = call.k.size(0), h_k = call.k.size(1);
    if (fork_mode::checks_values()) {
        Tables tables;
        tables.cu_seqlens_q = call.cu_seqlens_q;
        tables.cu_seqlens_k = call.cu_seqlens_k;
        tables.total_q = total_q;
        tables.total_k = total_k;
        Scratch scratch;
        check_values(tables, scratch, host);
    }
    // A sequence's sums begin 128 rows later for each sequence before it, so that no tile reaches its
    // neighbour's.
    run_gradients(call, call.q, call.k, call.v, call.lse,
        {{b, int(std::min<int64_t>(call.max_seqlen_q, kMostTokens)),
             int(std::min<int64_t>(call.max_seqlen_k, kMostTokens)), h, h_k, d},
            {b, h, h_k, total_q, call.max_seqlen_k, true}, total_q, total_q + int64_t(128) * b, total_q,
            total_k, call.cu_seqlens_q.as<int>(), call.cu_seqlens_k.as<int>(), call.zero_tensors},
        host);
}

}  // namespace core
}  // namespace FLASH_NAMESPACE

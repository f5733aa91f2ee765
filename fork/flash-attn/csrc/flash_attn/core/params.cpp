#include "params.h"

#include <algorithm>
#include <cmath>

#include "fork_kernel_set.h"
#include "settings.h"

namespace FLASH_NAMESPACE {
namespace core {

int64_t sequences(const Tensor &cu_seqlens_q) {
    FORK_CHECK_VALUE(
        cu_seqlens_q.elements() > 0, "cu_seqlens_q is empty; it has a number more than there are sequences");
    return cu_seqlens_q.elements() - 1;
}

void check_options(const Options &call) {
    FORK_CHECK(call.p_dropout >= 0.f && call.p_dropout < 1.f, call.names->dropout, "=", call.p_dropout,
        " is not a probability below 1");
    if (call.softcap > 0.f) {
        FORK_CHECK(call.p_dropout == 0.f, "Softcapping does not support dropout for now");
    }
}

void refuse_tokens(const Options &call, const char *name, int64_t tokens, int64_t of_sequence) {
    FORK_CHECK_VALUE(
        tokens <= kMostTokens, name, " has ", tokens, " tokens; kernels count up to ", kMostTokens);
    FORK_CHECK_VALUE(!has_window(call) || of_sequence <= kMostTokensOfWindow, name, " has ", of_sequence,
        " tokens of a sequence; with window_size kernels count up to ", kMostTokensOfWindow);
}

void check_grid(int64_t b, int64_t h) {
    constexpr int kMost = 65535;
    FORK_CHECK_VALUE(b <= kMost, "a call takes up to ", kMost, " sequences; there are ", b);
    FORK_CHECK_VALUE(h <= kMost, "a call takes up to ", kMost, " heads; there are ", h);
}

static void check_sink(const Options &call, Device device, int64_t h) {
    const Tensor &sink = call.learnable_sink;
    const Names &names = *call.names;
    if (!sink.given()) { return; }
    FORK_CHECK_NOT_IMPLEMENTED(
        call.p_dropout == 0.f, names.learnable_sink, " does not go with ", names.dropout, " > 0");
    // Causal kernels add the slope times the key's position, not its distance: other scores by a sum that a
    // softmax of keys alone does not notice. A window that ends at the query is theirs where it is long.
    FORK_CHECK_NOT_IMPLEMENTED(!call.alibi_slopes.given() || !(call.causal || call.window_right == 0),
        names.learnable_sink, " does not go with ", names.alibi_slopes,
        " where attention is causal or window_size ends in 0");
    FORK_CHECK_TYPE(sink.dtype == Dtype::fp32 || sink.dtype == Dtype::fp16 || sink.dtype == Dtype::bf16,
        names.learnable_sink, " has dtype ", sink.dtype, "; allowed is Float, Half or BFloat16");
    FORK_CHECK_VALUE(sink.dims == 1 && sink.size(0) == h, names.learnable_sink, " has shape ", sink.shape(),
        "; allowed is [", h, "], a number for each head of q");
    check_device(names.learnable_sink, sink, device);
    FORK_CHECK_VALUE(sink.contiguous(), names.learnable_sink, " must be contiguous");
}

void check_heads(const Options &call, Device device, int64_t b, int64_t h, int64_t h_k, int64_t d) {
    FORK_CHECK(d <= 256, "FlashAttention only supports head dimension at most 256; q has ", d);
    FORK_CHECK(
        d > 0 && d % 8 == 0, "query, key, value must have a head_size that is a multiple of 8; q has ", d);
    FORK_CHECK(h_k > 0 && h % h_k == 0,
        "Number of heads in key/value must divide number of heads in query; they are ", h_k, " and ", h);
    check_sink(call, device, h);
    if (!call.alibi_slopes.given()) { return; }
    const Tensor &slopes = call.alibi_slopes;
    const char *const name = call.names->alibi_slopes;
    FORK_CHECK(slopes.dtype == Dtype::fp32, name, " must have dtype fp32; it has ", slopes.dtype);
    FORK_CHECK((slopes.dims == 1 && slopes.size(0) == h)
            || (slopes.dims == 2 && slopes.size(0) == b && slopes.size(1) == h),
        name, " must have shape [", h, "] or [", b, ", ", h, "]; it has ", slopes.shape());
    check_device(name, slopes, device);
    check_rows(name, slopes);
}

void check_dtypes(const Tensor &q, std::initializer_list<std::pair<const char *, const Tensor *>> others) {
    FORK_CHECK(q.dtype == Dtype::fp16 || q.dtype == Dtype::bf16,
        "FlashAttention only support fp16 and bf16 data type; q has ", q.dtype);
    for (const auto &[name, tensor] : others) {
        FORK_CHECK(tensor->dtype == q.dtype, "query and ", name, " must have the same dtype; they have ",
            q.dtype, " and ", tensor->dtype);
    }
}

void check_kernels(const Tensor &q, bool backward) {
    using fork_kernels::Pass;
    const int head_dim = int(q.size(-1));
    const bool is_bf16 = q.dtype == Dtype::bf16;
    if (has_kernels(head_dim, is_bf16, backward)) { return; }
    fork_kernels::missing(
        backward ? Pass::bwd : Pass::fwd, fork_kernels::head_dim_of(head_dim), is_bf16, false);
}

void set_params(Flash_fwd_params &params, const Options &call, const Sizes4 &sizes, bool is_bf16,
    const Rows &q, const Rows &k, const Rows &v, const Rows &out, float *lse) {
    params.is_bf16 = is_bf16;

    params.q_ptr = q.data;
    params.k_ptr = k.data;
    params.v_ptr = v.data;
    params.o_ptr = out.data;
    params.q_batch_stride = q.batch;
    params.k_batch_stride = k.batch;
    params.v_batch_stride = v.batch;
    params.o_batch_stride = out.batch;
    params.q_row_stride = q.row;
    params.k_row_stride = k.row;
    params.v_row_stride = v.row;
    params.o_row_stride = out.row;
    params.q_head_stride = q.head;
    params.k_head_stride = k.head;
    params.v_head_stride = v.head;
    params.o_head_stride = out.head;
    params.softmax_lse_ptr = lse;

    params.b = sizes.b;
    params.h = sizes.h;
    params.h_k = sizes.h_k;
    params.h_h_k_ratio = sizes.h / sizes.h_k;
    params.fork.group = 1;
    params.seqlen_q = sizes.seqlen_q;
    params.seqlen_k = sizes.seqlen_k;
    params.seqlen_q_rounded = rounded(sizes.seqlen_q, 128);
    params.seqlen_k_rounded = rounded(sizes.seqlen_k, 128);
    params.d = sizes.d;
    params.d_rounded = rounded_head_dim(sizes.d);

    // In float, as upstream: a double here would move the last bit of a score.
    const float softmax_scale = call.softmax_scale, softcap = call.softcap;
    if (softcap > 0.f) {
        params.softcap = softmax_scale / softcap;
        params.scale_softmax = softcap;
        params.scale_softmax_log2 = softcap * M_LOG2E;
    } else {
        params.softcap = 0.f;
        params.scale_softmax = softmax_scale;
        params.scale_softmax_log2 = softmax_scale * M_LOG2E;
    }

    // The probability of keeping an element; compared with a random byte, rounded down.
    params.p_dropout = 1.f - call.p_dropout;
    params.p_dropout_in_uint8_t = uint8_t(std::floor(params.p_dropout * 255.0));
    params.rp_dropout = 1.f / params.p_dropout;
    params.scale_softmax_rp_dropout = params.rp_dropout * params.scale_softmax;

    // Causal is a window that ends at the query and begins nowhere; local is any other.
    int left = call.window_left, right = call.window_right;
    params.is_causal = left < 0 && right == 0;
    const int unbounded = std::min(sizes.seqlen_k, fork_window::kUnbounded);
    if (left < 0 && right >= 0) { left = unbounded; }
    if (left >= 0 && right < 0) { right = unbounded; }
    params.window_size_left = left;
    params.window_size_right = right;

    params.is_seqlens_k_cumulative = true;
    params.page_block_size = 1;
}

void set_alibi(Flash_fwd_params &params, const Options &call) {
    if (!call.alibi_slopes.given()) { return; }
    params.alibi_slopes_ptr = call.alibi_slopes.data;
    params.alibi_slopes_batch_stride = call.alibi_slopes.dims == 2 ? call.alibi_slopes.stride(0) : 0;
}

void set_sink(Flash_fwd_params &params, const Options &call, bool swapped) {
    if (!call.learnable_sink.given()) { return; }
    const Dtype dtype = call.learnable_sink.dtype;
    const auto type = dtype == Dtype::fp32 ? fork_sink::Type::fp32
        : dtype == Dtype::fp16             ? fork_sink::Type::fp16
                                           : fork_sink::Type::bf16;
    params.fork.sink = {call.learnable_sink.data, type, swapped};
}

}  // namespace core
}  // namespace FLASH_NAMESPACE

// attn_mask and attn_bias of a call, on the host.

#pragma once

#include <cmath>
#include <string>

#include <cutlass/numeric_types.h>

#include "namespace_config.h"
#include "call.h"
#include "flash.h"
#include "fork_mode.h"

namespace FLASH_NAMESPACE {
namespace core {

// The sizes that a mask's and a bias's may be, and how a call has its rows. Packed rows follow each other and
// have no dimension for the batch, or one query.
struct ScoreSizes {
    int64_t batch, heads, heads_k, queries, keys;
    bool packed;
};

inline std::string allowed_shapes(const ScoreSizes &sizes) {
    std::string heads = std::to_string(sizes.heads);
    if (sizes.heads_k != sizes.heads) { heads += " or " + std::to_string(sizes.heads_k); }
    heads += " or 1";
    if (!sizes.packed) {
        return text_of(
            "(", sizes.batch, " or 1, ", heads, ", ", sizes.queries, " or 1, ", sizes.keys, " or 1)");
    }
    return text_of("(", heads, ", ", sizes.queries, " (all queries) or 1, ", sizes.keys, " or 1), or (",
        sizes.batch, " or 1, ", heads, ", 1, ", sizes.keys, " or 1)");
}

// A dimension's size, counted from the last, which is 1; missing ones come first.
inline int64_t size_from_end(const Tensor &tensor, int from_end) {
    return from_end <= tensor.dims ? tensor.size(-from_end) : 1;
}

inline void check_scores_shape(
    const char *name, const Tensor &tensor, Device device, const ScoreSizes &sizes) {
    FORK_CHECK_VALUE(tensor.device == device, name, " is on ", tensor.device, ", q on ", device);
    const bool rows_follow = sizes.packed && tensor.dims < 4;
    const auto size = [&](int from_end) { return size_from_end(tensor, from_end); };
    const bool fits = tensor.dims >= 1 && tensor.dims <= 4 && (size(1) == sizes.keys || size(1) == 1)
        && (size(2) == 1 || (size(2) == sizes.queries && (!sizes.packed || rows_follow)))
        && (size(3) == 1 || size(3) == sizes.heads || size(3) == sizes.heads_k)
        && (size(4) == 1 || size(4) == sizes.batch);
    FORK_CHECK_VALUE(fits, name, " has shape ", tensor.shape(), "; allowed is ", allowed_shapes(sizes),
        "; dimensions may be left out from the first on");
    check_device(name, tensor, device);
}

inline void check_scores(
    const Options &call, const Tensor &q, const ScoreSizes &sizes, const char *leftpad = nullptr) {
    if (!call.attn_mask.given() && !call.attn_bias.given()) { return; }
    FORK_CHECK_NOT_IMPLEMENTED(fork_bias::kBuilt,
        "this wheel was built without attn_mask and attn_bias (no-bias among its kernels)");
    const Names &names = *call.names;
    FORK_CHECK_NOT_IMPLEMENTED(call.p_dropout == 0.f, names.attn_mask, " and ", names.attn_bias,
        " do not go with ", names.dropout, " > 0");
    FORK_CHECK_NOT_IMPLEMENTED(leftpad == nullptr, names.attn_mask, " and ", names.attn_bias,
        " do not go with ", leftpad, ": mask the padding");
    if (call.attn_mask.given()) {
        FORK_CHECK_TYPE(call.attn_mask.dtype == Dtype::boolean, names.attn_mask, " has dtype ",
            call.attn_mask.dtype, "; allowed is Bool (True: attend)");
        check_scores_shape(names.attn_mask, call.attn_mask, q.device, sizes);
    }
    if (call.attn_bias.given()) {
        const Dtype dtype = call.attn_bias.dtype;
        FORK_CHECK_TYPE(dtype == q.dtype || dtype == Dtype::fp32, names.attn_bias, " has dtype ", dtype,
            "; allowed is that of q, ", q.dtype, ", or Float");
        FORK_CHECK_VALUE(call.softcap > 0.f || call.softmax_scale != 0.f, names.attn_bias,
            " does not go with ", names.softmax_scale, "=0");
        check_scores_shape(names.attn_bias, call.attn_bias, q.device, sizes);
    }
}

// Strides of one of the two.
inline fork_bias::View view_of(const Tensor &tensor, const ScoreSizes &sizes) {
    const auto size = [&](int from_end) { return size_from_end(tensor, from_end); };
    const auto stride = [&](int from_end) {
        return size(from_end) == 1 ? int64_t(0) : tensor.stride(-from_end);
    };
    fork_bias::View view{tensor.data, stride(4), stride(3), stride(2), stride(1), 1};
    if (size(3) == sizes.heads_k && sizes.heads_k != sizes.heads) {
        view.heads_per_slice = sizes.heads / sizes.heads_k;
    }
    return view;
}

// Of a bias of the queries' type.
inline void set_terms(Flash_fwd_params &params, const Names &names, const Dtype type) {
    fork_bias::Params &scores = params.fork.scores;
    const float close = 0x1p-16f * std::abs(scores.inverse_scale);
    float rest = scores.inverse_scale;
    for (int i = 0; i < fork_bias::kTerms && std::abs(rest) > close; ++i) {
        const cutlass::half_t half(rest);
        const cutlass::bfloat16_t bfloat(rest);
        scores.inverse_terms[i] = type == Dtype::fp16 ? half.raw() : bfloat.raw();
        rest -= type == Dtype::fp16 ? float(half) : float(bfloat);
    }
    FORK_CHECK_VALUE(std::isfinite(close) && std::abs(rest) <= close, names.attn_bias, " of dtype ", type,
        " does not go with ", params.softcap > 0.f ? names.softcap : names.softmax_scale, "=",
        params.scale_softmax, "; Float does");
}

// Call after set_params. Where swapped, the queries of the heads of a group have been made the rows of one
// head: groups of them.
inline void set_scores(Flash_fwd_params &params, const Options &call, const ScoreSizes &sizes, int groups) {
    params.fork.scores = {};
    if (!call.attn_mask.given() && !call.attn_bias.given()) { return; }
    const bool swapped = groups > 1;
    const int paths = fork_mode::test_paths();
    params.fork.scores.rows = paths & fork_mode::kStandard ? 128 : paths & fork_mode::kOneBlock ? 64 : 0;
    const auto view = [&](const Tensor &tensor) {
        fork_bias::View view = view_of(tensor, sizes);
        if (swapped) {
            if (sizes.packed && tensor.dims < 4) { view.batch_stride = view.row_stride; }
            view.row_stride = 0;
            if (tensor.dims >= 3 && tensor.size(-3) == sizes.heads && sizes.heads != sizes.heads_k) {
                view.row_stride = view.head_stride;
                view.head_stride *= groups;
            }
            view.heads_per_slice = 1;
        }
        return view;
    };
    if (call.attn_mask.given()) { params.fork.scores.mask = view(call.attn_mask); }
    if (call.attn_bias.given()) {
        params.fork.scores.bias = view(call.attn_bias);
        params.fork.scores.bias_is_float = call.attn_bias.dtype == Dtype::fp32;
        params.fork.scores.inverse_scale = 1.f / params.scale_softmax;
        if (!params.fork.scores.bias_is_float) { set_terms(params, *call.names, call.attn_bias.dtype); }
    }
}

}  // namespace core
}  // namespace FLASH_NAMESPACE

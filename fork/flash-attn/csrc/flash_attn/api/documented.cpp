// The functions of flash_attention_v2.h, on those of its C header.

#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "api/answer.h"
#include "api/calls.h"
#include "api/flash_attention_v2.h"
#include "api/small_kernels.h"
#include "settings.h"

namespace FLASH_NAMESPACE {
namespace api {
namespace {

std::atomic<FlashAttentionV2Layout> layout{FlashAttentionV2Layout::batch_seq_heads_dim};

void check(const FlashAttentionV2Config &config) {
    const std::pair<const char *, int> sizes[] = {{"batch_size", config.batch_size},
        {"seq_len", config.seq_len}, {"num_heads", config.num_heads}, {"head_dim", config.head_dim}};
    for (const auto &[name, size] : sizes) { FORK_ACCEPT(size > 0, name, "=", size, " is not positive"); }
    FORK_ACCEPT(config.head_dim % 8 == 0 && config.head_dim <= 256, "head_dim=", config.head_dim,
        " is no multiple of 8 up to 256");
    FORK_ACCEPT(config.dropout_rate >= 0.f && config.dropout_rate < 1.f, "dropout_rate=", config.dropout_rate,
        " is not from 0 to below 1");
    elements_of("q", {config.batch_size, config.seq_len, config.num_heads, config.head_dim});
}

struct Pointer {
    const char *name;
    const void *at;
};
// Before anything is launched that reads there.
void check_places(std::initializer_list<Pointer> pointers, int device) {
    for (const Pointer &pointer : pointers) { check_place(pointer.name, pointer.at, device); }
}
void check(std::initializer_list<Pointer> pointers) {
    for (const Pointer &pointer : pointers) { FORK_ACCEPT(pointer.at != nullptr, pointer.name, " is null"); }
}

// l and the like are halves by themselves; kernels load 16 bytes of the others at once.
void check_alignment(std::initializer_list<Pointer> pointers) {
    for (const Pointer &pointer : pointers) {
        const size_t bytes = std::strcmp(pointer.name, "l") == 0 ? sizeof(half) : 16;
        FORK_ACCEPT(reinterpret_cast<uintptr_t>(pointer.at) % bytes == 0, pointer.name,
            " must begin at a multiple of ", bytes, " bytes");
    }
}

// The head dim of the kernels that serve one which may have none of its own.
int padded_head_dim(int head_dim, bool backward) {
    for (int padded = head_dim; padded <= 256; padded += 8) {
        if (core::has_kernels(padded, false, backward)) { return padded; }
    }
    throw Refusal(cudaErrorNotSupported,
        core::text_of("this build has no ", backward ? "backward" : "forward", " kernels for head_dim=",
            head_dim, " or more in float16; flash_attention_v2_kernels() lists what it has"));
}

// q, k, v and the like of a call: as they lie, or where this build has no kernels for their head dim, as
// copies with zeros behind their elements. Zeros change no score and no sum.
class Rows {
public:
    Rows(const FlashAttentionV2Config &config, Memory &memory, int head_dim)
        : config_(config), memory_(memory), head_dim_(head_dim) {
        if (layout == FlashAttentionV2Layout::batch_heads_seq_dim) { std::swap(heads_at_, row_at_); }
    }

    flash_attention_v2_tensor input(const half *data) {
        const flash_attention_v2_tensor own = lying(data, config_.head_dim);
        if (head_dim_ == config_.head_dim) { return own; }
        const flash_attention_v2_tensor copy = lying(taken(), head_dim_);
        copy_rows(own, copy, memory_.stream());
        return copy;
    }

    flash_attention_v2_tensor output(half *data) {
        return lying(head_dim_ == config_.head_dim ? data : taken(), head_dim_);
    }
    // After the launch.
    void finish(const flash_attention_v2_tensor &output, half *data) {
        if (output.data != data) { copy_rows(output, lying(data, config_.head_dim), memory_.stream()); }
    }

    int64_t lse_count() const { return int64_t(config_.batch_size) * config_.num_heads * config_.seq_len; }
    flash_attention_v2_tensor lse(float *data) const {
        return contiguous(
            data, FLASH_ATTENTION_V2_FLOAT32, {config_.batch_size, config_.num_heads, config_.seq_len});
    }

private:
    half *taken() { return memory_.take_some<half>(lse_count() * head_dim_); }

    // (b, s, h, d), whichever of s and h comes first in memory.
    flash_attention_v2_tensor lying(const half *data, int head_dim) const {
        std::array<int64_t, 4> sizes{config_.batch_size, 0, 0, head_dim};
        sizes[row_at_] = config_.seq_len;
        sizes[heads_at_] = config_.num_heads;
        flash_attention_v2_tensor tensor =
            contiguous(data, FLASH_ATTENTION_V2_FLOAT16, {sizes[0], sizes[1], sizes[2], sizes[3]});
        if (row_at_ != 1) {
            std::swap(tensor.sizes[1], tensor.sizes[2]);
            std::swap(tensor.strides[1], tensor.strides[2]);
        }
        return tensor;
    }

    const FlashAttentionV2Config &config_;
    Memory &memory_;
    const int head_dim_;
    int row_at_ = 1, heads_at_ = 2;
};

void set_options(flash_attention_v2_options &options, const FlashAttentionV2Config &config) {
    options.softmax_scale = usual_scale(config.head_dim);  // not that of a padded one
    options.causal = config.use_causal_mask;
    options.dropout = config.dropout_rate;
    options.seed = config.seed;
}

void forward(const half *q, const half *k, const half *v, half *o, half *l,
    const FlashAttentionV2Config &config, cudaStream_t stream) {
    const std::initializer_list<Pointer> pointers = {{"q", q}, {"k", k}, {"v", v}, {"o", o}, {"l", l}};
    check(pointers);
    check(config);
    check_alignment(pointers);
    const int head_dim = padded_head_dim(config.head_dim, false);
    const Ready ready;
    check_places(pointers, ready.device());
    Memory memory = Memory::of_stream(ready.device(), stream);
    Rows rows(config, memory, head_dim);
    float *const lse = memory.take_some<float>(rows.lse_count());
    auto call = defaults<flash_attention_v2_forward_call>();
    set_options(call.options, config);
    call.q = rows.input(q);
    call.k = rows.input(k);
    call.v = rows.input(v);
    call.out = rows.output(o);
    call.lse = rows.lse(lse);
    run(call, memory);
    rows.finish(call.out, o);
    to_half(lse, l, rows.lse_count(), stream);
}

void backward(const half *q, const half *k, const half *v, const half *o, const half *l, const half *do_grad,
    half *dq, half *dk, half *dv, const FlashAttentionV2Config &config, cudaStream_t stream) {
    const std::initializer_list<Pointer> pointers = {{"q", q}, {"k", k}, {"v", v}, {"o", o}, {"l", l},
        {"do_grad", do_grad}, {"dq", dq}, {"dk", dk}, {"dv", dv}};
    check(pointers);
    check(config);
    check_alignment(pointers);
    const int head_dim = padded_head_dim(config.head_dim, true);
    const Ready ready;
    check_places(pointers, ready.device());
    Memory memory = Memory::of_stream(ready.device(), stream);
    Rows rows(config, memory, head_dim);
    float *const lse = memory.take_some<float>(rows.lse_count());
    to_float(l, lse, rows.lse_count(), stream);
    auto call = defaults<flash_attention_v2_backward_call>();
    set_options(call.options, config);
    call.q = rows.input(q);
    call.k = rows.input(k);
    call.v = rows.input(v);
    call.out = rows.input(o);
    call.dout = rows.input(do_grad);
    call.lse = rows.lse(lse);
    call.dq = rows.output(dq);
    call.dk = rows.output(dk);
    call.dv = rows.output(dv);
    run(call, memory);
    rows.finish(call.dq, dq);
    rows.finish(call.dk, dk);
    rows.finish(call.dv, dv);
}

}  // namespace
}  // namespace api
}  // namespace FLASH_NAMESPACE

using namespace FLASH_NAMESPACE;

cudaError_t flash_attention_v2_set_layout(FlashAttentionV2Layout layout) {
    return api::answered([&] {
        FORK_ACCEPT(layout == FlashAttentionV2Layout::batch_seq_heads_dim
                || layout == FlashAttentionV2Layout::batch_heads_seq_dim,
            "layout=", int(layout), " is none");
        api::layout = layout;
    });
}

bool is_config_valid(const FlashAttentionV2Config &config) {
    return api::answered([&] { api::check(config); }) == cudaSuccess;
}

cudaError_t flash_attention_v2_forward(const half *q, const half *k, const half *v, half *o, half *l,
    const FlashAttentionV2Config &config, cudaStream_t stream) {
    return api::answered([&] { api::forward(q, k, v, o, l, config, stream); });
}

cudaError_t flash_attention_v2_backward(const half *q, const half *k, const half *v, const half *o,
    const half *l, const half *do_grad, half *dq, half *dk, half *dv, const FlashAttentionV2Config &config,
    cudaStream_t stream) {
    return api::answered([&] { api::backward(q, k, v, o, l, do_grad, dq, dk, dv, config, stream); });
}

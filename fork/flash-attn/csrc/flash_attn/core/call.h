// The calls that the core answers. A caller fills one in and keeps all memory; nothing of a framework is
// here.
//
// Sizes: b sequences, h heads of queries, h_k of keys and values, d elements of a head. Tensors that a call
// need not have are left as they are. check(call) says what is wrong with a call, without touching memory;
// run(call, host) checks and launches it, or says what scratch it takes (Host::measured). Both throw
// core::Error. The outputs, lse among them, are the caller's.

#pragma once

#include <cstdint>

#include "namespace_config.h"
#include "fork_mode.h"
#include "fork_runtime.h"  // PhiloxState
#include "host.h"
#include "tensor.h"

namespace FLASH_NAMESPACE {
namespace core {

// What the caller calls its arguments, in errors: those of Python's functions, or another interface's.
struct Names {
    const char *kcache = "k_cache", *vcache = "v_cache", *k_new = "k", *v_new = "v";
    const char *seqlens_k = "cache_seqlens", *cache_leftpad = "cache_leftpad", *leftpad_k = "leftpad_k";
    const char *lse = "softmax_lse", *dropout = "dropout_p";
    const char *alibi_slopes = "alibi_slopes", *attn_mask = "attn_mask", *attn_bias = "attn_bias",
               *learnable_sink = "learnable_sink", *softcap = "softcap", *softmax_scale = "softmax_scale";
};
inline constexpr Names kNamesInPython;

struct Options {
    const Names *names = &kNamesInPython;
    float p_dropout = 0.f, softmax_scale = 1.f, softcap = 0.f;
    bool causal = false;
    int window_left = -1, window_right = -1;       // tokens; -1: no bound
    int64_t split_size = fork_mode::kProcessWide;  // tokens of a chunk; 0: the mode is off
    Tensor alibi_slopes;                           // (h) or (b, h), float32
    Tensor attn_mask, attn_bias;                   // see scores.h
    // (h), float32, float16 or bfloat16; of forward calls. Backward ones take it in their lse: log(exp(lse) +
    // exp(sink)) in place of lse
    Tensor learnable_sink;
};

struct Forward : Options {
    Tensor q;     // (b, seqlen_q, h, d), float16 or bfloat16
    Tensor k, v;  // (b, seqlen_k, h_k, d)
    Tensor out;   // as q
    Tensor lse;   // (b, h, seqlen_q), float32
    // With dropout: where it goes (b, h, and both lengths rounded to 128), or not given
    Tensor probabilities;
    PhiloxState philox;
    uint64_t *rng_state = nullptr;  // on the GPU: the kernel writes seed and offset
};

struct VarlenForward : Options {
    Tensor q;                           // (total_q, h, d)
    Tensor k, v;                        // (total_k, h_k, d); with pages (pages, page size, h_k, d)
    Tensor out;                         // as q
    Tensor lse;                         // (h, total_q), float32
    Tensor cu_seqlens_q, cu_seqlens_k;  // (b + 1), int32
    Tensor seqused_k, leftpad_k;        // (b), int32
    Tensor block_table;                 // (b, pages of a sequence), int32
    int max_seqlen_q = 0, max_seqlen_k = 0;
    bool zero_tensors = false;  // out is 0, and lse -inf, in rows of no sequence
    Tensor probabilities;
    PhiloxState philox;
    uint64_t *rng_state = nullptr;
};

struct CacheForward : Options {
    Tensor q;                       // (b, seqlen_q, h, d)
    Tensor kcache, vcache;          // (sequences, capacity, h_k, d); with pages (pages, page size, h_k, d)
    Tensor out;                     // as q
    Tensor lse;                     // (b, h, seqlen_q), float32
    Tensor k, v;                    // new: (b, seqlen_new, h_k, d)
    Tensor seqlens_k;               // (b), int32
    Tensor rotary_cos, rotary_sin;  // (rows, rotary dim / 2), of q's dtype
    Tensor cache_batch_idx;         // (b), int32
    Tensor leftpad_k;               // (b), int32
    Tensor block_table;             // (b, pages of a sequence), int32
    bool is_rotary_interleaved = false;
    int num_splits = 0;  // 0: as many as fill the GPU
};

struct Gradients : Options {
    Tensor dout, out, dq;       // as q
    Tensor dk, dv;              // as k
    Tensor dk_heads, dv_heads;  // with fewer heads of keys: dk and dv of each head of queries, for the caller
                                // to sum; where they are not given, the core does, in the heads' order
    // (b, h, seqlen_q rounded to 128) or (h, total_q + 128 b), float32: the rows' sums of dout * out, minus
    // lse_gradient; with dropout times the probability to keep
    Tensor softmax_d;
    Tensor bias_gradient;  // of attn_bias's shape and dtype, contiguous; or not given
    Tensor lse_gradient;   // of lse's shape, float32, contiguous: of a loss on it; or not given
    bool deterministic = false;
    uint64_t *rng_state = nullptr;  // with dropout: the forward call's
};

struct Backward : Gradients {
    Tensor q, k, v, lse;  // as Forward's, lse contiguous
};

struct VarlenBackward : Gradients {
    Tensor q, k, v, lse;  // as VarlenForward's, lse contiguous
    Tensor cu_seqlens_q, cu_seqlens_k;
    int max_seqlen_q = 0, max_seqlen_k = 0;
    bool zero_tensors = false;  // gradients are 0 in rows of no sequence
};

// That of forward calls which follows from the mode: whether its split_size fits a head dim.
void check_mode(const Options &call, int64_t d);

void check(const Forward &call);
void check(const VarlenForward &call);
void check(const CacheForward &call);
void check(const Backward &call);
void check(const VarlenBackward &call);

void run(const Forward &given, const Host &host);
void run(const VarlenForward &given, const Host &host);
void run(const CacheForward &given, const Host &host);
void run(const Backward &given, const Host &host);
void run(const VarlenBackward &given, const Host &host);

// While code of the framework's runs within a call, as Host's functions do. It may make another GPU the
// current one and call the core; at its end the call's GPU is the current one again.
int enter_framework();
void leave_framework(int before);
class InFramework {
public:
    InFramework() : entered_(enter_framework()) {}
    ~InFramework() { leave_framework(entered_); }
    InFramework(const InFramework &) = delete;
    InFramework &operator=(const InFramework &) = delete;

private:
    int entered_;
};

}  // namespace core
}  // namespace FLASH_NAMESPACE

// The core's calls as functions of apache-tvm-ffi: tensors come by DLPack, so neither torch's nor Python's
// symbols are here. flash_attn_2_cuda/__init__.py calls them.

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include "bound.h"
#include "fork_window.h"
#include "host.h"

// apache-tvm-ffi's headers use it. libstdc++ has this constructor from GCC 9 on, and older systems have
// wheels too: so it is compiled into ours.
template class std::basic_ostringstream<char>;

namespace FLASH_NAMESPACE {
namespace core {
namespace {

namespace ffi = tvm::ffi;
using Given = ffi::Optional<DLTensor *>;  // a TensorView would be copied at each step on its way

#ifdef FORK_EMULATED
constexpr int kGpu = kDLCPU;  // kernels run on the CPU, in ordinary memory
#else
constexpr int kGpu = kDLCUDA;
#endif

Dtype dtype_of(DLDataType type) {
    if (type.lanes == 1) {
        if (type.code == kDLFloat && type.bits == 16) { return Dtype::fp16; }
        if (type.code == kDLBfloat && type.bits == 16) { return Dtype::bf16; }
        if (type.code == kDLFloat && type.bits == 32) { return Dtype::fp32; }
        if (type.code == kDLInt && type.bits == 32) { return Dtype::int32; }
        if (type.code == kDLInt && type.bits == 64) { return Dtype::int64; }
        if (type.code == kDLBool) { return Dtype::boolean; }
    }
    return Dtype::other;
}

// traced: a tensor of a program that is being traced. It lies nowhere, and is told as if on the first GPU.
Tensor tensor_of(const Given &given, bool traced) {
    Tensor tensor;
    if (!given.has_value()) { return tensor; }
    const DLTensor &view = **given;
    FORK_CHECK_VALUE(view.ndim <= kMostDims, "a tensor has ", view.ndim,
        " dimensions; no argument has more than ", kMostDims);
    tensor.data = static_cast<char *>(view.data) + view.byte_offset;
    tensor.dtype = dtype_of(view.dtype);
    tensor.device = {traced || view.device.device_type == kGpu, traced ? 0 : view.device.device_id};
    tensor.dims = view.ndim;
    std::copy_n(view.shape, view.ndim, tensor.sizes);
    std::copy_n(view.strides, view.ndim, tensor.strides);
    if (traced && tensor.data == nullptr) { tensor.data = &tensor; }  // nobody reads it
    return tensor;
}

// A window's side, or a length, in the kernels' 32 bits.
int clipped(int64_t window) {
    return int(std::max<int64_t>(-1, std::min<int64_t>(window, fork_window::kUnbounded)));
}
int length(const char *name, int64_t value) {
    FORK_CHECK_VALUE(value >= 0 && value <= INT32_MAX, name, "=", value, " is no length");
    return int(value);
}

// Scratch from the allocator of the framework that the tensors came from, and the caller's stream.
struct Caller {
    DLDevice device;
    std::vector<ffi::Tensor> held;

    explicit Caller(const DLTensor &q) : device(q.device) {}
    Host host() {
        return {static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id)), this,
            &allocate, &warn};
    }

    static void *allocate(void *context, size_t bytes) {
        const InFramework running;
        Caller &caller = *static_cast<Caller *>(context);
        const int64_t sizes[] = {int64_t(bytes)};
        caller.held.push_back(ffi::Tensor::FromEnvAlloc(
            TVMFFIEnvTensorAlloc, ffi::ShapeView(sizes, 1), DLDataType{kDLUInt, 8, 1}, caller.device));
        return caller.held.back().data_ptr();
    }

    // flash_attn_2_cuda tells Python, once each.
    static void warn(void *, const char *text) {
        const InFramework running;
        static const ffi::Function tell = ffi::Function::GetGlobalRequired("flash_attn.warn");
        tell(ffi::String(text));
    }
};

const char *name_of(Kind kind) {
    switch (kind) {
    case Kind::value:
        return "ValueError";
    case Kind::type:
        return "TypeError";
    case Kind::not_implemented:
        return "NotImplementedError";
    case Kind::memory:
        return "MemoryError";
    default:
        return "RuntimeError";
    }
}

// Runs what may raise an error of the core's, and raises it as Python's.
template<typename Function>
auto translated(Function &&function) {
    try {
        return function();
    } catch (const Error &error) { throw ffi::Error(name_of(error.kind), error.what(), ""); }
}

// What the caller wants: flash_attn_2_cuda has the same numbers.
enum Manner : int64_t {
    kRun,
    kCheck,        // no more than that, of a call that is being traced
    kRunLoadable,  // run it if kernels can load its tensors as they lie, and say whether
};

bool all_loadable(std::initializer_list<const Tensor *> tensors) {
    return std::all_of(tensors.begin(), tensors.end(),
        [](const Tensor *tensor) { return !tensor->given() || tensor->loadable(); });
}
bool loadable(const Forward &call) { return all_loadable({&call.q, &call.k, &call.v}); }
bool loadable(const VarlenForward &call) { return all_loadable({&call.q, &call.k, &call.v}); }
bool loadable(const CacheForward &call) {
    return all_loadable(
        {&call.q, &call.kcache, &call.vcache, &call.k, &call.v, &call.rotary_cos, &call.rotary_sin});
}

template<typename Call>
void run_for(const Call &call, const DLTensor &q) {
    Caller caller(q);
    run(call, caller.host());
}

// Whether the call was answered as wanted.
template<typename Call>
bool answer(const Call &call, const DLTensor &q, int64_t manner) {
    if (manner == kCheck) {
        check(call);
        return true;
    }
    if (manner == kRunLoadable && !loadable(call)) { return false; }
    run_for(call, q);
    return true;
}

struct Scalars {
    double p_dropout, softmax_scale, softcap;
    bool causal;
    int64_t window_left, window_right, split_size;
};

void set_options(Options &call, const Scalars &scalars, const Given &alibi_slopes, const Given &attn_mask,
    const Given &attn_bias, bool traced) {
    call.p_dropout = float(scalars.p_dropout);
    call.softmax_scale = float(scalars.softmax_scale);
    call.softcap = float(scalars.softcap);
    call.causal = scalars.causal;
    call.window_left = clipped(scalars.window_left);
    call.window_right = clipped(scalars.window_right);
    call.split_size = scalars.split_size;
    call.alibi_slopes = tensor_of(alibi_slopes, traced);
    call.attn_mask = tensor_of(attn_mask, traced);
    call.attn_bias = tensor_of(attn_bias, traced);
}

// Dropout's random state: numbers, or within a capture where a replay finds them.
template<typename Call>
void set_random(Call &call, int64_t seed, int64_t offset, const Given &seed_at, const Given &offset_at,
    const Given &rng_state) {
    call.philox.seed = uint64_t(seed);
    call.philox.offset = uint64_t(offset);
    if (seed_at.has_value()) {
        call.philox.seed_ptr = static_cast<const int64_t *>((*seed_at)->data);
        call.philox.offset_ptr = static_cast<const int64_t *>((*offset_at)->data);
        call.philox.offset_intragraph = uint64_t(offset);
    }
    if (rng_state.has_value()) { call.rng_state = static_cast<uint64_t *>((*rng_state)->data); }
}

bool fwd(DLTensor *q, DLTensor *k, DLTensor *v, Given out, Given lse, Given alibi_slopes, Given attn_mask,
    Given attn_bias, double p_dropout, double softmax_scale, bool causal, int64_t window_left,
    int64_t window_right, double softcap, int64_t split_size, int64_t manner, Given probabilities,
    Given rng_state, int64_t seed, int64_t offset, Given seed_at, Given offset_at, Given learnable_sink) {
    return translated([&] {
        const bool traced = manner == kCheck;
        Forward call;
        set_options(call, {p_dropout, softmax_scale, softcap, causal, window_left, window_right, split_size},
            alibi_slopes, attn_mask, attn_bias, traced);
        call.learnable_sink = tensor_of(learnable_sink, traced);
        call.q = tensor_of(q, traced);
        call.k = tensor_of(k, traced);
        call.v = tensor_of(v, traced);
        call.out = tensor_of(out, traced);
        call.lse = tensor_of(lse, traced);
        call.probabilities = tensor_of(probabilities, traced);
        set_random(call, seed, offset, seed_at, offset_at, rng_state);
        return answer(call, *q, manner);
    });
}

bool varlen_fwd(DLTensor *q, DLTensor *k, DLTensor *v, Given out, Given lse, Given cu_seqlens_q,
    Given cu_seqlens_k, Given seqused_k, Given leftpad_k, Given block_table, Given alibi_slopes,
    Given attn_mask, Given attn_bias, int64_t max_seqlen_q, int64_t max_seqlen_k, double p_dropout,
    double softmax_scale, bool zero_tensors, bool causal, int64_t window_left, int64_t window_right,
    double softcap, int64_t split_size, int64_t manner, Given probabilities, Given rng_state, int64_t seed,
    int64_t offset, Given seed_at, Given offset_at, Given learnable_sink) {
    return translated([&] {
        const bool traced = manner == kCheck;
        VarlenForward call;
        set_options(call, {p_dropout, softmax_scale, softcap, causal, window_left, window_right, split_size},
            alibi_slopes, attn_mask, attn_bias, traced);
        call.learnable_sink = tensor_of(learnable_sink, traced);
        call.q = tensor_of(q, traced);
        call.k = tensor_of(k, traced);
        call.v = tensor_of(v, traced);
        call.out = tensor_of(out, traced);
        call.lse = tensor_of(lse, traced);
        call.cu_seqlens_q = tensor_of(cu_seqlens_q, traced);
        call.cu_seqlens_k = tensor_of(cu_seqlens_k, traced);
        call.seqused_k = tensor_of(seqused_k, traced);
        call.leftpad_k = tensor_of(leftpad_k, traced);
        call.block_table = tensor_of(block_table, traced);
        call.max_seqlen_q = length("max_seqlen_q", max_seqlen_q);
        call.max_seqlen_k = length("max_seqlen_k", max_seqlen_k);
        call.zero_tensors = zero_tensors;
        call.probabilities = tensor_of(probabilities, traced);
        set_random(call, seed, offset, seed_at, offset_at, rng_state);
        return answer(call, *q, manner);
    });
}

bool fwd_kvcache(DLTensor *q, DLTensor *kcache, DLTensor *vcache, Given out, Given lse, Given k, Given v,
    Given seqlens_k, Given rotary_cos, Given rotary_sin, Given cache_batch_idx, Given leftpad_k,
    Given block_table, Given alibi_slopes, Given attn_mask, Given attn_bias, double softmax_scale,
    bool causal, int64_t window_left, int64_t window_right, double softcap, bool rotary_interleaved,
    int64_t num_splits, int64_t split_size, int64_t manner, Given learnable_sink) {
    return translated([&] {
        CacheForward call;
        set_options(call, {0., softmax_scale, softcap, causal, window_left, window_right, split_size},
            alibi_slopes, attn_mask, attn_bias, false);
        call.learnable_sink = tensor_of(learnable_sink, false);
        call.q = tensor_of(q, false);
        call.kcache = tensor_of(kcache, false);
        call.vcache = tensor_of(vcache, false);
        call.out = tensor_of(out, false);
        call.lse = tensor_of(lse, false);
        call.k = tensor_of(k, false);
        call.v = tensor_of(v, false);
        call.seqlens_k = tensor_of(seqlens_k, false);
        call.rotary_cos = tensor_of(rotary_cos, false);
        call.rotary_sin = tensor_of(rotary_sin, false);
        call.cache_batch_idx = tensor_of(cache_batch_idx, false);
        call.leftpad_k = tensor_of(leftpad_k, false);
        call.block_table = tensor_of(block_table, false);
        call.is_rotary_interleaved = rotary_interleaved;
        call.num_splits = int(std::min<int64_t>(num_splits, INT32_MAX));
        return answer(call, *q, manner);
    });
}

// The same with kRunLoadable, and with what a decoding step gives alone: each argument takes time. Without a
// scale, it is 1 / sqrt(d).
bool fwd_kvcache_short(DLTensor *q, DLTensor *kcache, DLTensor *vcache, Given out, Given lse, Given seqlens_k,
    Given block_table, ffi::Optional<double> softmax_scale, bool causal, int64_t num_splits,
    int64_t split_size) {
    const double d = q->ndim > 0 ? q->shape[q->ndim - 1] : 1;
    const double scale = softmax_scale.has_value() ? *softmax_scale : 1. / std::sqrt(d);
    return fwd_kvcache(q, kcache, vcache, out, lse, {}, {}, seqlens_k, {}, {}, {}, {}, block_table, {}, {},
        {}, scale, causal, -1, -1, 0., false, num_splits, split_size, kRunLoadable, {});
}

// What both kinds of gradients have.
struct GradientTensors {
    Given dout, out, dq, dk, dv, dk_heads, dv_heads, softmax_d, bias_gradient, rng_state, lse_gradient;
    bool deterministic;
};

void set_gradients(Gradients &call, const GradientTensors &given, bool traced) {
    call.dout = tensor_of(given.dout, traced);
    call.out = tensor_of(given.out, traced);
    call.dq = tensor_of(given.dq, traced);
    call.dk = tensor_of(given.dk, traced);
    call.dv = tensor_of(given.dv, traced);
    call.dk_heads = tensor_of(given.dk_heads, traced);
    call.dv_heads = tensor_of(given.dv_heads, traced);
    call.softmax_d = tensor_of(given.softmax_d, traced);
    call.bias_gradient = tensor_of(given.bias_gradient, traced);
    call.lse_gradient = tensor_of(given.lse_gradient, traced);
    call.deterministic = given.deterministic;
    if (given.rng_state.has_value()) { call.rng_state = static_cast<uint64_t *>((*given.rng_state)->data); }
}

void bwd(DLTensor *dout, DLTensor *q, DLTensor *k, DLTensor *v, DLTensor *out, DLTensor *lse, Given dq,
    Given dk, Given dv, Given dk_heads, Given dv_heads, Given softmax_d, Given bias_gradient,
    Given alibi_slopes, Given attn_mask, Given attn_bias, Given rng_state, double p_dropout,
    double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double softcap,
    bool deterministic, int64_t split_size, bool traced, Given lse_gradient) {
    translated([&] {
        Backward call;
        set_options(call, {p_dropout, softmax_scale, softcap, causal, window_left, window_right, split_size},
            alibi_slopes, attn_mask, attn_bias, traced);
        set_gradients(call,
            {dout, out, dq, dk, dv, dk_heads, dv_heads, softmax_d, bias_gradient, rng_state, lse_gradient,
                deterministic},
            traced);
        call.q = tensor_of(q, traced);
        call.k = tensor_of(k, traced);
        call.v = tensor_of(v, traced);
        call.lse = tensor_of(lse, traced);
        traced ? check(call) : run_for(call, *q);
    });
}

void varlen_bwd(DLTensor *dout, DLTensor *q, DLTensor *k, DLTensor *v, DLTensor *out, DLTensor *lse, Given dq,
    Given dk, Given dv, Given dk_heads, Given dv_heads, Given softmax_d, Given bias_gradient,
    Given cu_seqlens_q, Given cu_seqlens_k, Given alibi_slopes, Given attn_mask, Given attn_bias,
    Given rng_state, int64_t max_seqlen_q, int64_t max_seqlen_k, double p_dropout, double softmax_scale,
    bool zero_tensors, bool causal, int64_t window_left, int64_t window_right, double softcap,
    bool deterministic, int64_t split_size, bool traced, Given lse_gradient) {
    translated([&] {
        VarlenBackward call;
        set_options(call, {p_dropout, softmax_scale, softcap, causal, window_left, window_right, split_size},
            alibi_slopes, attn_mask, attn_bias, traced);
        set_gradients(call,
            {dout, out, dq, dk, dv, dk_heads, dv_heads, softmax_d, bias_gradient, rng_state, lse_gradient,
                deterministic},
            traced);
        call.q = tensor_of(q, traced);
        call.k = tensor_of(k, traced);
        call.v = tensor_of(v, traced);
        call.lse = tensor_of(lse, traced);
        call.cu_seqlens_q = tensor_of(cu_seqlens_q, traced);
        call.cu_seqlens_k = tensor_of(cu_seqlens_k, traced);
        call.max_seqlen_q = length("max_seqlen_q", max_seqlen_q);
        call.max_seqlen_k = length("max_seqlen_k", max_seqlen_k);
        call.zero_tensors = zero_tensors;
        traced ? check(call) : run_for(call, *q);
    });
}

// The mode.

void ffi_check_environment() {
    translated([] { check_environment(); });
}

// The tokens of a chunk, or their default; an error for such as no kernel can take.
int64_t ffi_check_split_size(ffi::Optional<int64_t> split_size, ffi::String source) {
    return translated([&] {
        if (!split_size.has_value()) { return default_split_size(); }
        check_split_size(*split_size, source);
        return *split_size;
    });
}

void ffi_set_process_mode(bool enabled, int64_t split_size) {
    translated([&] { set_process_mode(enabled, split_size); });
}
// Both halves in one word, so that nobody sees half of a change: 2^32 where it is on, and the tokens.
int64_t ffi_process_mode() {
    return translated([] { return process_mode(); });
}

// Names of the kernels here, one a line.
ffi::String kernel_set() {
    std::string lines;
    for (const std::string &name : kernel_names()) { lines += (lines.empty() ? "" : "\n") + name; }
    return lines;
}
bool has_attn_bias() { return has_scores(); }

// For tests; both return what was set before.
int64_t test_paths(int64_t paths) { return exchange_test_paths(paths); }
int64_t test_scratch(int64_t bytes) { return exchange_test_scratch(bytes); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fwd, fwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(varlen_fwd, varlen_fwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fwd_kvcache, fwd_kvcache);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fwd_kvcache_short, fwd_kvcache_short);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bwd, bwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(varlen_bwd, varlen_bwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_environment, ffi_check_environment);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_split_size, ffi_check_split_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_process_mode, ffi_set_process_mode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(process_mode, ffi_process_mode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kernel_set, kernel_set);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_attn_bias, has_attn_bias);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(test_paths, test_paths);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(test_scratch, test_scratch);

}  // namespace core
}  // namespace FLASH_NAMESPACE

#include "api/calls.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <utility>

#include "api/answer.h"
#include "api/small_kernels.h"
#include "call.h"
#include "fork_window.h"
#include "settings.h"

namespace FLASH_NAMESPACE {
namespace api {

namespace {

using Array = flash_attention_v2_tensor;

// What programs were compiled with, of every 1.y. Structs grow at their ends alone.
static_assert(sizeof(Array) == 80 && sizeof(flash_attention_v2_options) == 368);
static_assert(sizeof(flash_attention_v2_forward_call) == 1696);
static_assert(sizeof(flash_attention_v2_backward_call) == 1376);
static_assert(offsetof(flash_attention_v2_options, learnable_sink) == 304);

constexpr core::Names kNames{"k", "v", "k_new", "v_new", "cache_seqlens", "leftpad_k", "leftpad_k", "lse",
    "options.dropout", "options.alibi_slopes", "options.mask", "options.bias", "options.learnable_sink",
    "options.softcap", "options.softmax_scale"};

constexpr int64_t kMostElements = int64_t(1) << 46;

core::Dtype dtype_of(const char *name, int32_t dtype) {
    switch (dtype) {
    case FLASH_ATTENTION_V2_FLOAT16:
        return core::Dtype::fp16;
    case FLASH_ATTENTION_V2_BFLOAT16:
        return core::Dtype::bf16;
    case FLASH_ATTENTION_V2_FLOAT32:
        return core::Dtype::fp32;
    case FLASH_ATTENTION_V2_INT32:
        return core::Dtype::int32;
    case FLASH_ATTENTION_V2_BOOL:
        return core::Dtype::boolean;
    default:
        throw Refusal(
            cudaErrorInvalidValue, core::text_of(name, ".dtype=", dtype, " is no flash_attention_v2_dtype"));
    }
}

// The arrays of a call, which lie on its device.
class Arrays {
public:
    explicit Arrays(const Memory &memory)
        : measures_(memory.measures()), runs_(memory.runs()), device_(memory.device()) {}

    // Any, where kernels can read it; or one that need not be given.
    core::Tensor any(const char *name, const Array &array) const {
        core::Tensor tensor = described(name, array);
        if (tensor.given()) { check(name, tensor.data, tensor.elements()); }
        return tensor;
    }
    // An address of so many elements that kernels read or write: each mistake of the host's would end the
    // context.
    void check(const char *name, const void *data, int64_t elements) const {
        if (elements == 0) { return; }
        FORK_ACCEPT(data != nullptr, name, ".data is null");
        if (runs_) { check_place(name, data, device_); }
    }

    // Memory of the call's own.
    core::Tensor described(const char *name, const Array &array) const {
        core::Tensor tensor;
        FORK_ACCEPT(array.rank >= 0 && array.rank <= 4, name, ".rank=", array.rank, " is not from 1 to 4");
        if (array.rank == 0) {
            FORK_ACCEPT(array.data == nullptr, name, " has data, but rank 0");
            return tensor;
        }
        tensor.dtype = dtype_of(name, array.dtype);
        tensor.device = {true, device_};
        tensor.dims = array.rank;
        for (int i = 0; i < array.rank; ++i) {
            FORK_ACCEPT(array.sizes[i] >= 0 && array.sizes[i] <= INT_MAX, name, ".sizes[", i,
                "]=", array.sizes[i], " is no size");
            tensor.sizes[i] = array.sizes[i];
            tensor.strides[i] = array.strides[i];
        }
        int64_t sizes[4] = {1, 1, 1, 1};
        std::copy_n(array.sizes, array.rank, sizes);
        elements_of(name, {sizes[0], sizes[1], sizes[2], sizes[3]});
        tensor.data = array.data;
        FORK_ACCEPT(reinterpret_cast<uintptr_t>(tensor.data) % core::bytes_of(tensor.dtype) == 0, name,
            ".data is not aligned to its elements");
        // Nobody reads it.
        if (measures_ && tensor.data == nullptr) { tensor.data = reinterpret_cast<void *>(256); }
        return tensor;
    }

    // A table of numbers or a float32 array: the core checks the rest.
    core::Tensor given(const char *name, const Array &array) const {
        FORK_ACCEPT(array.rank != 0, name, " is not given");
        return any(name, array);
    }

    // Rows of elements of heads, which kernels load or store 16 bytes at a time.
    core::Tensor rows(const char *name, const Array &array) const {
        const core::Tensor tensor = given(name, array);
        check_rows(name, tensor);
        return tensor;
    }
    core::Tensor any_rows(const char *name, const Array &array) const {
        const core::Tensor tensor = any(name, array);
        if (tensor.given()) { check_rows(name, tensor); }
        return tensor;
    }
    // The same of a result, whose elements must not share memory.
    core::Tensor result_rows(const char *name, const Array &array) const {
        const core::Tensor tensor = rows(name, array);
        for (int i = 0; i < tensor.dims; ++i) {
            FORK_ACCEPT(tensor.strides[i] != 0 || tensor.sizes[i] <= 1 || tensor.elements() == 0, name,
                ".strides[", i, "]=0: elements of a result share memory");
        }
        return tensor;
    }

private:
    static void check_rows(const char *name, const core::Tensor &tensor) {
        FORK_ACCEPT_AS(cudaErrorNotSupported, tensor.dtype != core::Dtype::fp32, name,
            " is float32; kernels multiply float16 and bfloat16 alone, so convert it");
        FORK_ACCEPT(tensor.loadable(), name,
            "'s rows must have no gaps between elements, and begin at multiples "
            "of 16 bytes");
    }

    const bool measures_, runs_;
    const int device_;
};

int window_of(const char *name, int32_t window) {
    FORK_ACCEPT(window >= -1, "options.", name, "=", window, " is neither a number of keys nor -1");
    return std::min<int>(window, fork_window::kUnbounded);
}

bool flag_of(const char *name, int32_t flag) {
    FORK_ACCEPT(flag == 0 || flag == 1, name, "=", flag, " is neither 0 nor 1");
    return flag == 1;
}

int64_t step_of_sink(const flash_attention_v2_options &options) {
    return options.learnable_sink_stride == 0 ? 1 : options.learnable_sink_stride;
}

// As one that has no gaps, which the core checks.
core::Tensor sink_of(const flash_attention_v2_options &options, const Arrays &arrays, int64_t heads) {
    if (options.learnable_sink == nullptr) {
        FORK_ACCEPT(options.learnable_sink_stride == 0 && options.learnable_sink_dtype == 0
                && options.dsink == nullptr,
            "options.learnable_sink is null, but another field of it is set");
        return {};
    }
    FORK_ACCEPT(options.learnable_sink_stride >= 0 && options.learnable_sink_stride <= INT_MAX,
        "options.learnable_sink_stride=", options.learnable_sink_stride, " is no stride");
    return arrays.any(kNames.learnable_sink,
        contiguous(options.learnable_sink, flash_attention_v2_dtype(options.learnable_sink_dtype), {heads}));
}

void set_options(core::Options &call, const flash_attention_v2_options &options, const Arrays &arrays,
    const core::Tensor &q) {
    call.names = &kNames;
    int64_t reserved = options.reserved_number;
    for (const int64_t number : options.reserved) { reserved |= number; }
    FORK_ACCEPT(reserved == 0, "options.reserved is not 0: fill the call in with its defaults first");
    FORK_ACCEPT(std::isfinite(options.softmax_scale) && options.softmax_scale >= 0.f,
        "options.softmax_scale=", options.softmax_scale, " is no scale");
    FORK_ACCEPT(std::isfinite(options.softcap) && options.softcap >= 0.f, "options.softcap=", options.softcap,
        " is no cap");
    FORK_ACCEPT(options.dropout >= 0.f && options.dropout < 1.f, "options.dropout=", options.dropout,
        " is not from 0 to below 1");
    FORK_ACCEPT((options.seed_at == nullptr) == (options.offset_at == nullptr),
        "options.seed_at and offset_at go together");
    for (const auto &[name, at] : {std::make_pair("options.seed_at", options.seed_at),
             std::make_pair("options.offset_at", options.offset_at)}) {
        FORK_ACCEPT(
            reinterpret_cast<uintptr_t>(at) % sizeof(*at) == 0, name, " is not aligned to its number");
        if (at != nullptr) { arrays.check(name, at, 1); }
    }
    FORK_ACCEPT(options.split_size >= -1, "options.split_size=", options.split_size,
        " is neither tokens nor 0 (off) nor -1 (as the process has it)");
    if (options.split_size > 0) {
        core::check_split_size(options.split_size, core::text_of("options.split_size=", options.split_size));
    }
    call.p_dropout = options.dropout;
    call.softmax_scale = options.softmax_scale != 0.f ? options.softmax_scale : usual_scale(q.size(-1));
    call.softcap = options.softcap;
    call.causal = flag_of("options.causal", options.causal);
    call.window_left = window_of("window_left", options.window_left);
    call.window_right = window_of("window_right", options.window_right);
    call.split_size = options.split_size;
    call.alibi_slopes = arrays.any("options.alibi_slopes", options.alibi_slopes);
    call.attn_mask = arrays.any("options.mask", options.mask);
    call.attn_bias = arrays.any("options.bias", options.bias);
    call.learnable_sink = sink_of(options, arrays, q.dims > 1 ? q.size(-2) : 1);
}

// Where a head's numbers lie apart, or the backward pass takes them, kernels get them as float32, one behind
// the other.
float *packed_sink(const flash_attention_v2_options &options, int64_t heads, Memory &memory) {
    float *const packed = memory.take_some<float>(heads);
    if (memory.runs()) {
        to_floats(options.learnable_sink, flash_attention_v2_dtype(options.learnable_sink_dtype),
            step_of_sink(options), packed, heads, memory.stream());
    }
    return packed;
}
void pack_sink(core::Options &call, const flash_attention_v2_options &options, Memory &memory) {
    if (!call.learnable_sink.given() || step_of_sink(options) == 1) { return; }
    call.learnable_sink.data = packed_sink(options, call.learnable_sink.size(0), memory);
    call.learnable_sink.dtype = core::Dtype::fp32;
}

PhiloxState random_state(const flash_attention_v2_options &options) {
    PhiloxState state;
    state.seed = options.seed;
    state.offset = options.offset;
    if (options.seed_at != nullptr) {
        state.seed_ptr = options.seed_at;
        state.offset_ptr = options.offset_at;
        state.offset_intragraph = options.offset;
    }
    return state;
}

// Where the kernels of a call with dropout write, or read, its state.
uint64_t *place_of_random_state(const flash_attention_v2_options &options, Memory &memory) {
    return options.dropout > 0.f ? memory.take_some<uint64_t>(2) : nullptr;
}

void check_kernels(const core::Tensor &q, bool backward) {
    const int64_t d = q.size(-1);
    if (d < 1 || d > 256) { return; }  // the core's to tell
    FORK_ACCEPT_AS(cudaErrorNotSupported, core::has_kernels(int(d), q.dtype == core::Dtype::bf16, backward),
        "this build has no kernels for head dim ", d, " in ", q.dtype, backward ? ", backward" : ", forward",
        "; flash_attention_v2_kernels() lists what it has");
}

// The caller's, or one that nobody reads: contiguous float32 of these sizes.
core::Tensor lse_of(const Arrays &arrays, const Array &given, std::initializer_list<int64_t> sizes,
    const char *words, Memory &memory, const core::Tensor &q) {
    if (given.rank != 0) {
        core::Tensor lse = arrays.any("lse", given);
        core::check_shape("lse", lse, sizes, words);
        core::check_device("lse", lse, q.device);
        FORK_ACCEPT(lse.dtype == core::Dtype::fp32 && lse.contiguous(), "lse must be contiguous float32");
        return lse;
    }
    const int64_t count = elements_of("lse", sizes);
    return arrays.described(
        "lse", contiguous(memory.take_some<float>(count), FLASH_ATTENTION_V2_FLOAT32, sizes));
}

// The rows' sums of dout * out: room for whole tiles, contiguous float32.
core::Tensor room(const Arrays &arrays, std::initializer_list<int64_t> sizes, Memory &memory) {
    const int64_t count = elements_of("the workspace", sizes);
    return arrays.described(
        "softmax_d", contiguous(memory.take_some<float>(count), FLASH_ATTENTION_V2_FLOAT32, sizes));
}

int64_t rounded_to_tiles(int64_t length) { return (length + 127) / 128 * 128; }

// Of the longest packed sequence: 0 is what the defaults have, and would leave all results at 0.
int length_of(const char *name, int32_t length, bool any_tokens) {
    FORK_ACCEPT(length >= 0, name, "=", length, " is no length");
    FORK_ACCEPT(
        length > 0 || !any_tokens, name, " is 0: packed calls need the length of the longest sequence");
    return length;
}

// Of which kind a call is, so that what does not belong to it is not passed over in silence.
struct Field {
    const char *name;
    const Array *array;
};
void refuse(std::initializer_list<Field> fields, const char *why) {
    for (const Field &field : fields) {
        FORK_ACCEPT(field.array->rank == 0, field.name, " does not go with ", why);
    }
}
struct Number {
    const char *name;
    int64_t value;
};
void refuse_numbers(std::initializer_list<Number> numbers, const char *why) {
    for (const Number &number : numbers) {
        FORK_ACCEPT(number.value == 0, number.name, "=", number.value, " does not go with ", why);
    }
}
bool any_given(std::initializer_list<const Array *> arrays) {
    return std::any_of(arrays.begin(), arrays.end(), [](const Array *array) { return array->rank != 0; });
}

// All that can be wrong with a forward call, but for its lse and its workspace.
template<typename Call>
void check_forward(const Call &call, const flash_attention_v2_options &options) {
    FORK_ACCEPT(options.dsink == nullptr, "options.dsink is of backward calls");
    check_kernels(call.q, false);
    core::check(call);
    core::check_mode(call, call.q.size(-1));
}

template<typename Call>
void answer(const Call &call, Memory &memory) {
    if (memory.runs() || memory.measures()) { core::run(call, memory.host()); }
}

void run_dense(const flash_attention_v2_forward_call &given, const Arrays &arrays, Memory &memory) {
    refuse({{"cu_seqlens_q", &given.cu_seqlens_q}, {"cu_seqlens_k", &given.cu_seqlens_k},
               {"seqused_k", &given.seqused_k}},
        "q of rank 4, which is not packed");
    refuse({{"leftpad_k", &given.leftpad_k}}, "sequences of one length: use a mask, or a cache");
    refuse_numbers({{"max_seqlen_q", given.max_seqlen_q}, {"max_seqlen_k", given.max_seqlen_k},
                       {"zero_gaps", given.zero_gaps}, {"num_splits", given.num_splits},
                       {"rotary_interleaved", given.rotary_interleaved}},
        "sequences of one length");
    core::Forward call;
    call.q = arrays.rows("q", given.q);
    call.k = arrays.rows("k", given.k);
    call.v = arrays.rows("v", given.v);
    call.out = arrays.result_rows("out", given.out);
    set_options(call, given.options, arrays, call.q);
    check_forward(call, given.options);
    call.lse = lse_of(arrays, given.lse, {call.q.size(0), call.q.size(2), call.q.size(1)},
        "batch_size, num_heads, seqlen_q", memory, call.q);
    call.philox = random_state(given.options);
    call.rng_state = place_of_random_state(given.options, memory);
    pack_sink(call, given.options, memory);
    answer(call, memory);
}

void run_packed(const flash_attention_v2_forward_call &given, const Arrays &arrays, Memory &memory) {
    refuse({{"cache_seqlens", &given.cache_seqlens}, {"k_new", &given.k_new}, {"v_new", &given.v_new},
               {"rotary_cos", &given.rotary_cos}, {"rotary_sin", &given.rotary_sin},
               {"cache_batch_idx", &given.cache_batch_idx}},
        "packed q, of rank 3 (seqused_k says how many keys are in use)");
    refuse_numbers({{"num_splits", given.num_splits}, {"rotary_interleaved", given.rotary_interleaved}},
        "packed q, of rank 3");
    core::VarlenForward call;
    call.q = arrays.rows("q", given.q);
    call.k = arrays.rows("k", given.k);
    call.v = arrays.rows("v", given.v);
    call.out = arrays.result_rows("out", given.out);
    call.cu_seqlens_q = arrays.given("cu_seqlens_q", given.cu_seqlens_q);
    call.cu_seqlens_k = arrays.given("cu_seqlens_k", given.cu_seqlens_k);
    call.seqused_k = arrays.any("seqused_k", given.seqused_k);
    call.leftpad_k = arrays.any("leftpad_k", given.leftpad_k);
    call.block_table = arrays.any("block_table", given.block_table);
    call.max_seqlen_q = length_of("max_seqlen_q", given.max_seqlen_q, call.q.elements() > 0);
    call.max_seqlen_k = length_of("max_seqlen_k", given.max_seqlen_k, call.k.elements() > 0);
    call.zero_tensors = flag_of("zero_gaps", given.zero_gaps);
    set_options(call, given.options, arrays, call.q);
    check_forward(call, given.options);
    call.lse =
        lse_of(arrays, given.lse, {call.q.size(1), call.q.size(0)}, "num_heads, total_q", memory, call.q);
    call.philox = random_state(given.options);
    call.rng_state = place_of_random_state(given.options, memory);
    pack_sink(call, given.options, memory);
    answer(call, memory);
}

void run_cache(const flash_attention_v2_forward_call &given, const Arrays &arrays, Memory &memory) {
    refuse({{"cu_seqlens_q", &given.cu_seqlens_q}, {"cu_seqlens_k", &given.cu_seqlens_k},
               {"seqused_k", &given.seqused_k}},
        "caches (cache_seqlens says how many keys are in use)");
    refuse_numbers({{"max_seqlen_q", given.max_seqlen_q}, {"max_seqlen_k", given.max_seqlen_k},
                       {"zero_gaps", given.zero_gaps}},
        "caches");
    FORK_ACCEPT(given.options.dropout == 0.f, "options.dropout does not go with caches");
    core::CacheForward call;
    call.q = arrays.rows("q", given.q);
    call.kcache = arrays.rows("k", given.k);
    call.vcache = arrays.rows("v", given.v);
    call.out = arrays.result_rows("out", given.out);
    call.k = arrays.any_rows("k_new", given.k_new);
    call.v = arrays.any_rows("v_new", given.v_new);
    FORK_ACCEPT(call.k.given() == call.v.given(), "k_new and v_new go together");
    call.seqlens_k = arrays.any("cache_seqlens", given.cache_seqlens);
    call.rotary_cos = arrays.any_rows("rotary_cos", given.rotary_cos);
    call.rotary_sin = arrays.any_rows("rotary_sin", given.rotary_sin);
    FORK_ACCEPT(call.rotary_cos.given() == call.rotary_sin.given(), "rotary_cos and rotary_sin go together");
    call.cache_batch_idx = arrays.any("cache_batch_idx", given.cache_batch_idx);
    call.leftpad_k = arrays.any("leftpad_k", given.leftpad_k);
    call.block_table = arrays.any("block_table", given.block_table);
    call.is_rotary_interleaved = flag_of("rotary_interleaved", given.rotary_interleaved);
    FORK_ACCEPT(given.num_splits >= 0, "num_splits=", given.num_splits, " is negative");
    call.num_splits = given.num_splits;
    set_options(call, given.options, arrays, call.q);
    check_forward(call, given.options);
    call.lse = lse_of(arrays, given.lse, {call.q.size(0), call.q.size(2), call.q.size(1)},
        "batch_size, num_heads, seqlen_q", memory, call.q);
    pack_sink(call, given.options, memory);
    answer(call, memory);
}

void set_gradients(
    core::Gradients &call, const flash_attention_v2_backward_call &given, const Arrays &arrays) {
    call.dout = arrays.rows("dout", given.dout);
    call.out = arrays.rows("out", given.out);
    call.dq = arrays.result_rows("dq", given.dq);
    call.dk = arrays.result_rows("dk", given.dk);
    call.dv = arrays.result_rows("dv", given.dv);
    call.bias_gradient = arrays.any("dbias", given.dbias);
    call.deterministic = flag_of("deterministic", given.deterministic);
    set_options(call, given.options, arrays, call.dout);
    if (!call.bias_gradient.given()) { return; }
    const core::Tensor &bias = call.attn_bias, &gradient = call.bias_gradient;
    bool same = bias.dims == gradient.dims && bias.dtype == gradient.dtype && gradient.contiguous();
    for (int i = 0; same && i < bias.dims; ++i) { same = bias.sizes[i] == gradient.sizes[i]; }
    FORK_ACCEPT(same, "dbias must be contiguous, with the shape and dtype of options.bias");
}

void give_random_state(core::Gradients &call, const flash_attention_v2_options &options, Memory &memory) {
    call.rng_state = place_of_random_state(options, memory);
    if (call.rng_state == nullptr || !memory.runs()) { return; }
    put_random_state(call.rng_state, random_state(options), memory.stream());
}

template<typename Call>
void set_inputs(Call &call, const flash_attention_v2_backward_call &given, const Arrays &arrays) {
    call.q = arrays.rows("q", given.q);
    call.k = arrays.rows("k", given.k);
    call.v = arrays.rows("v", given.v);
    call.lse = arrays.given("lse", given.lse);
    FORK_ACCEPT(call.lse.contiguous(), "lse must be contiguous float32");
    check_kernels(call.q, true);
}

// The state of dropout is checked by the core, and written once nothing is wrong.
template<typename Call>
void check_gradients(Call &call) {
    uint64_t nowhere[2];
    call.rng_state = call.p_dropout > 0.f ? nowhere : nullptr;
    core::check(call);
}

// A sink takes part in a row's weights by way of its lse. Its own gradient is made of the rows' sums.
template<typename Call>
void answer_with_sink(Call &call, const flash_attention_v2_options &options, const Arrays &arrays,
    Memory &memory, const SinkRows &rows) {
    if (!call.learnable_sink.given()) { return answer(call, memory); }
    const int64_t heads = call.learnable_sink.size(0);
    if (options.dsink != nullptr) { arrays.check("options.dsink", options.dsink, heads); }
    const core::Tensor of_keys = call.lse;
    const float *const sink = packed_sink(options, heads, memory);
    call.lse.data = memory.take_some<float>(of_keys.elements());
    if (memory.runs()) {
        join_sink(of_keys.as<float>(), sink, call.lse.template as<float>(), rows.rows, heads,
            of_keys.elements(), memory.stream());
    }
    answer(call, memory);
    if (memory.runs() && options.dsink != nullptr) {
        sink_gradient(options.dsink, sink, of_keys.as<float>(), call.softmax_d.template as<float>(), rows,
            heads, memory.stream());
    }
}

void run_dense(const flash_attention_v2_backward_call &given, const Arrays &arrays, Memory &memory) {
    core::Backward call;
    set_gradients(call, given, arrays);
    set_inputs(call, given, arrays);
    check_gradients(call);
    const int64_t b = call.q.size(0), seqlen_q = call.q.size(1), h = call.q.size(2);
    core::check_shape("lse", call.lse, {b, h, seqlen_q}, "batch_size, num_heads, seqlen_q");
    call.softmax_d = room(arrays, {b, h, rounded_to_tiles(seqlen_q)}, memory);
    give_random_state(call, given.options, memory);
    answer_with_sink(call, given.options, arrays, memory, {nullptr, b, seqlen_q, rounded_to_tiles(seqlen_q)});
}

void run_packed(const flash_attention_v2_backward_call &given, const Arrays &arrays, Memory &memory) {
    core::VarlenBackward call;
    set_gradients(call, given, arrays);
    set_inputs(call, given, arrays);
    call.cu_seqlens_q = arrays.given("cu_seqlens_q", given.cu_seqlens_q);
    call.cu_seqlens_k = arrays.given("cu_seqlens_k", given.cu_seqlens_k);
    call.max_seqlen_q = length_of("max_seqlen_q", given.max_seqlen_q, call.q.elements() > 0);
    call.max_seqlen_k = length_of("max_seqlen_k", given.max_seqlen_k, call.k.elements() > 0);
    call.zero_tensors = flag_of("zero_gaps", given.zero_gaps);
    check_gradients(call);
    const int64_t total_q = call.q.size(0), h = call.q.size(1), b = call.cu_seqlens_q.elements() - 1;
    core::check_shape("lse", call.lse, {h, total_q}, "num_heads, total_q");
    call.softmax_d = room(arrays, {h, total_q + 128 * b}, memory);
    give_random_state(call, given.options, memory);
    answer_with_sink(call, given.options, arrays, memory,
        {call.cu_seqlens_q.template as<int>(), b, total_q, total_q + 128 * b});
}

}  // namespace

int64_t elements_of(const char *name, std::initializer_list<int64_t> sizes) {
    int64_t elements = 1;
    for (const int64_t size : sizes) {
        if (size == 0) { return 0; }
    }
    for (const int64_t size : sizes) {
        FORK_ACCEPT(!__builtin_mul_overflow(elements, size, &elements) && elements <= kMostElements, name,
            " has more elements than memory could hold");
    }
    return elements;
}

float usual_scale(int64_t head_dim) { return float(1.0 / std::sqrt(double(std::max<int64_t>(head_dim, 1)))); }

// 2 MiB of addresses that were seen to be a device's memory: the driver maps no smaller part of it, and
// asking for each array would take longer than all other checks. Where it has become the host's or another
// device's since, the launch tells.
struct Place {
    uintptr_t block = 0;  // address / 2 MiB
    int device = -1;
};
constexpr int kPlaces = 64;
thread_local Place places[kPlaces];

void check_place(const char *name, const void *data, int device) {
    const uintptr_t block = reinterpret_cast<uintptr_t>(data) >> 21;
    Place &place = places[block % kPlaces];
#ifndef FORK_EMULATED  // where a block of addresses may be of both
    if (place.block == block && place.device == device) { return; }
#endif
    cudaPointerAttributes found;
    if (cudaPointerGetAttributes(&found, data) != cudaSuccess) {
        cudaGetLastError();  // then a launch will tell
        return;
    }
    int reads_host = 0;  // some systems have one memory for both
    const bool reachable = found.type == cudaMemoryTypeDevice || found.type == cudaMemoryTypeManaged
        || (found.type == cudaMemoryTypeHost && found.devicePointer != nullptr)
        || (cudaDeviceGetAttribute(&reads_host, cudaDevAttrPageableMemoryAccess, device) == cudaSuccess
            && reads_host);
    FORK_ACCEPT(reachable, name, " lies in the host's memory, where the device cannot read it");
    FORK_ACCEPT(found.type != cudaMemoryTypeDevice || found.device == device, name, " lies on device ",
        found.device, "; the current device is ", device);
    if (found.type == cudaMemoryTypeDevice) { place = {block, device}; }
}

flash_attention_v2_tensor contiguous(
    const void *data, flash_attention_v2_dtype dtype, std::initializer_list<int64_t> sizes) {
    flash_attention_v2_tensor tensor{};
    tensor.data = const_cast<void *>(data);
    tensor.dtype = dtype;
    for (const int64_t size : sizes) { tensor.sizes[tensor.rank++] = size; }
    int64_t stride = 1;
    for (int i = tensor.rank - 1; i >= 0; stride *= tensor.sizes[i--]) { tensor.strides[i] = stride; }
    return tensor;
}

template<typename Call>
const Call &known(const Call *call) {
    FORK_ACCEPT(call != nullptr, "call is null");
    FORK_ACCEPT(call->size == sizeof(Call), "size=", call->size,
        " is no version of the call that this library (", FLASH_ATTENTION_V2_VERSION, ") knows, which has ",
        sizeof(Call),
        " bytes: fill the call in with its defaults, and link the library that the header came with");
    return *call;
}
template const flash_attention_v2_forward_call &known(const flash_attention_v2_forward_call *);
template const flash_attention_v2_backward_call &known(const flash_attention_v2_backward_call *);

void run(const flash_attention_v2_forward_call &call, Memory &memory) {
    const Arrays arrays(memory);
    if (call.q.rank == 3) { return run_packed(call, arrays, memory); }
    const bool cache = any_given({&call.cache_seqlens, &call.k_new, &call.v_new, &call.rotary_cos,
        &call.rotary_sin, &call.cache_batch_idx, &call.block_table});
    cache ? run_cache(call, arrays, memory) : run_dense(call, arrays, memory);
}

void run(const flash_attention_v2_backward_call &call, Memory &memory) {
    const Arrays arrays(memory);
    if (call.q.rank == 3) { return run_packed(call, arrays, memory); }
    refuse({{"cu_seqlens_q", &call.cu_seqlens_q}, {"cu_seqlens_k", &call.cu_seqlens_k}},
        "q of rank 4, which is not packed");
    refuse_numbers({{"max_seqlen_q", call.max_seqlen_q}, {"max_seqlen_k", call.max_seqlen_k},
                       {"zero_gaps", call.zero_gaps}},
        "q of rank 4, which is not packed");
    run_dense(call, arrays, memory);
}

}  // namespace api
}  // namespace FLASH_NAMESPACE

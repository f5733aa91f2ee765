// Forward calls: dense, packed, and on a cache.

#include <algorithm>
#include <limits>

#include "call.h"
#include "fork_split.h"
#include "launch.h"
#include "params.h"
#include "scores.h"
#include "small_kernels.h"
#include "values.h"

namespace FLASH_NAMESPACE {
namespace core {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kPageGranule = 16;  // tokens

// Whether heads that share keys become rows of one head, so that a single query of a sequence fills a tile.
bool swaps_groups(const Options &call, bool single_query, int64_t h, int64_t h_k) {
    return single_query && h > h_k && call.window_left < 0 && call.window_right < 0 && call.p_dropout == 0.f
        && !call.alibi_slopes.given();
}

// Upstream takes a window as long as the call's keys for none; in deterministic mode what a row sees follows
// from its own sequence. For a single query causal is the same as not, unless slopes ask where it stands.
void tidy_windows(Options &call, int split_size, int64_t seqlen_k) {
    if (split_size > 0) { return; }
    if (call.window_left >= seqlen_k) { call.window_left = -1; }
    if (call.window_right >= seqlen_k) { call.window_right = -1; }
}
void tidy_causal(Options &call, bool single_query) {
    if (single_query && !call.alibi_slopes.given()) { call.causal = false; }
    if (call.causal) { call.window_right = 0; }
}

void check_output(const char *name, const Tensor &out, const Tensor &q) {
    FORK_CHECK(
        out.dtype == q.dtype, name, " must have the same dtype as q, ", q.dtype, "; it has ", out.dtype);
    check_device(name, out, q.device);
    bool same = out.dims == q.dims;
    for (int i = 0; same && i < q.dims; ++i) { same = out.sizes[i] == q.sizes[i]; }
    FORK_CHECK(same, name, " must have shape ", q.shape(), ", that of q; it has ", out.shape());
    check_rows(name, out);
}

void check_inputs(const Tensor &q, const char *k_name, const Tensor &k, const char *v_name, const Tensor &v) {
    check_device("q", q, q.device);
    check_device(k_name, k, q.device);
    check_device(v_name, v, q.device);
    check_dtypes(q, {{k_name, &k}, {v_name, &v}});
    check_rows("q", q);
    check_rows(k_name, k);
    check_rows(v_name, v);
}

// Checks what a call writes. Where the caller wants no lse, kernels write it to memory that nobody reads.
void set_results(const Tensor &out, Tensor &lse, int64_t rows, const Host &host) {
    if (!lse.given()) {
        lse.data = unread_memory(rows * sizeof(float), host);
        lse.dtype = Dtype::fp32;
        lse.device = out.device;
        lse.dims = 1;
        lse.sizes[0] = rows;
        lse.strides[0] = 1;
    }
    FORK_CHECK(out.given() && lse.dtype == Dtype::fp32 && lse.contiguous() && lse.elements() == rows,
        "lse must be a contiguous float32 tensor of ", rows, " elements, beside out");
}

// Kernels step over pages in units of 2^shift elements, which all of a pool's steps are multiples of.
int page_shift(const Tensor &k, const Tensor &v) {
    const int64_t strides = k.stride(0) | k.stride(1) | v.stride(0) | v.stride(1);
    int shift = 0;
    while (shift < 30 && (strides >> shift & 1) == 0) { ++shift; }
    return shift;
}

// Of pools of pages: (pages, page size, h_k, d).
void check_pages(const Tensor &block_table, const Tensor &k, const Tensor &v, const Tensor &q) {
    check_rank("block_table", block_table, 2, "(batch_size, max_num_blocks_per_seq)");
    FORK_CHECK(
        block_table.dtype == Dtype::int32, "block_table must have dtype int32; it has ", block_table.dtype);
    check_device("block_table", block_table, q.device);
    check_rows("block_table", block_table);
    FORK_CHECK(k.size(1) % kPageGranule == 0, "Paged KV cache block size must be divisible by ", kPageGranule,
        "; it is ", k.size(1));
    // A kernel's offset of a page that is smaller than its tile has 32 bits. With rows aligned to 16 bytes
    // alone that reaches 64 GiB, to 128 bytes 512.
    if (k.size(1) % 256 == 0) { return; }
    for (const Tensor *pool : {&k, &v}) {
        const int64_t end = pool->size(0) * pool->stride(0) + pool->size(1) * pool->stride(1);
        FORK_CHECK(end >> page_shift(k, v) <= UINT32_MAX, "a pool of ", pool->size(0), " pages of ",
            pool->size(1), " tokens reaches too far, with strides ", pool->stride(0), " and ",
            pool->stride(1),
            ": align its rows to a larger power of two, or take pages of a multiple of 256 tokens");
    }
}

// The name, where there is one.
const char *check_leftpad(
    const char *name, const Tensor &leftpad_k, bool paged, int64_t batch_size, Device device) {
    if (!leftpad_k.given()) { return nullptr; }
    FORK_CHECK(!paged, name, " does not go with block_table");
    check_table(name, leftpad_k, device);
    FORK_CHECK_SHAPE(name, leftpad_k, batch_size);
    return name;
}

// What rows have that see no key.
void fill_keyless(const Tensor &out, const Tensor &lse, const Host &host) {
    fill(out, 0.f, host.stream);
    fill(lse, kInfinity, host.stream);
}

// Without queries or sequences, where a launch would be an error.
bool has_rows(const Tensor &q, int64_t sequences) { return sequences > 0 && q.elements() > 0; }

int split_size_of(const Options &call, const Host &host, int64_t d, bool has_leftpad, int num_splits = 0) {
    const fork_mode::Mode mode = fork_mode::of_call(call.split_size);
    return fork_split::split_size_of_call(
        host, mode, int(d), call.softmax_scale, call.p_dropout, has_leftpad, num_splits);
}

void set_dropout(Flash_fwd_params &params, const Options &call, const PhiloxState &philox,
    const Tensor &probabilities, uint64_t *rng_state) {
    params.p_ptr = probabilities.given() ? probabilities.data : nullptr;
    params.philox_args = philox;
    params.rng_state = rng_state;
    FORK_CHECK(!probabilities.given() || call.p_dropout > 0.f,
        "return_softmax is only supported when p_dropout > 0.0");
    FORK_CHECK(call.p_dropout == 0.f || rng_state != nullptr, "dropout needs a place for its random state");
}

}  // namespace

void check_mode(const Options &call, int64_t d) {
    split_size_of(call, {nullptr, nullptr, nullptr, [](void *, const char *) {}}, d, false);
}

void check(const Forward &call) {
    const Tensor &q = call.q, &k = call.k, &v = call.v;
    check_rank("q", q, 4, "(batch_size, seqlen_q, num_heads, head_size)");
    check_rank("k", k, 4, "(batch_size, seqlen_k, num_heads_k, head_size)");
    check_rank("v", v, 4, "(batch_size, seqlen_k, num_heads_k, head_size)");
    check_inputs(q, "k", k, "v", v);
    const int64_t batch_size = q.size(0), num_heads = q.size(2), head_size = q.size(3), seqlen_k = k.size(1),
                  num_heads_k = k.size(2);
    check_options(call);
    check_heads(call, q.device, batch_size, num_heads, num_heads_k, head_size);
    check_kernels(q, false);
    check_tokens(call, "q", q.size(1), q.size(1), "k", seqlen_k, seqlen_k);
    FORK_CHECK_SHAPE("k", k, batch_size, seqlen_k, num_heads_k, head_size);
    FORK_CHECK_SHAPE("v", v, batch_size, seqlen_k, num_heads_k, head_size);
    if (call.out.given()) { check_output("out", call.out, q); }
    check_scores(call, q, {batch_size, num_heads, num_heads_k, q.size(1), seqlen_k, false});
}

void run(const Forward &given, const Host &host) {
    Forward call = given;
    check(call);
    const OnGpu guard(call.q.device.index);
    check_gpu();
    set_results(call.out, call.lse, call.q.size(0) * call.q.size(1) * call.q.size(2), host);
    if (!has_rows(call.q, call.q.size(0))) { return; }
    const Tensor &q = call.q, &k = call.k;
    const int b = q.size(0), h = q.size(2), h_k = k.size(2), d = q.size(3), seqlen_k = k.size(1);
    const bool single_query = q.size(1) == 1;
    const int split_size = split_size_of(call, host, d, false);
    tidy_windows(call, split_size, seqlen_k);
    tidy_causal(call, single_query);
    const bool swapped = swaps_groups(call, single_query, h, h_k);
    const int groups = swapped ? h / h_k : 1;

    Flash_fwd_params params{};
    set_params(params, call, {b, swapped ? groups : int(q.size(1)), seqlen_k, swapped ? h_k : h, h_k, d},
        q.dtype == Dtype::bf16, swapped ? groups_as_rows(q, groups) : rows_of(q), rows_of(k), rows_of(call.v),
        swapped ? groups_as_rows(call.out, groups) : rows_of(call.out), call.lse.as<float>());
    fork_split::set_params(params, split_size, call.window_left, call.window_right);
    set_scores(params, call, {b, h, h_k, q.size(1), seqlen_k, false}, groups);
    set_alibi(params, call);
    Scratch scratch;
    set_splits(params, scratch, host, call.p_dropout, 0);
    set_dropout(params, call, call.philox, call.probabilities, call.rng_state);
    set_sink(params, call, swapped);
    if (host.measured != nullptr) { return; }
    if (seqlen_k > 0) {
        run_forward(params, host.stream, false);
    } else {
        fill_keyless(call.out, call.lse, host);
    }
}

void check(const VarlenForward &call) {
    const Tensor &q = call.q, &k = call.k, &v = call.v, &cu_seqlens_q = call.cu_seqlens_q,
                 &cu_seqlens_k = call.cu_seqlens_k, &seqused_k = call.seqused_k;
    const bool paged = call.block_table.given();
    check_rank("q", q, 3, "(total_q, num_heads, head_size)");
    const char *shape =
        paged ? "(num_blocks, page_block_size, num_heads_k, head_size)" : "(total_k, num_heads_k, head_size)";
    check_rank("k", k, paged ? 4 : 3, shape);
    check_rank("v", v, paged ? 4 : 3, shape);
    check_inputs(q, "k", k, "v", v);
    check_table("cu_seqlens_q", cu_seqlens_q, q.device);
    check_table("cu_seqlens_k", cu_seqlens_k, q.device);
    const int64_t batch_size = sequences(cu_seqlens_q), num_heads = q.size(1), head_size = q.size(2),
                  num_heads_k = k.size(-2);
    check_options(call);
    check_heads(call, q.device, batch_size, num_heads, num_heads_k, head_size);
    check_kernels(q, false);
    FORK_CHECK_VALUE(call.max_seqlen_q >= 0 && call.max_seqlen_k >= 0,
        "max_seqlen_q and max_seqlen_k must not be negative");
    FORK_CHECK_SHAPE("cu_seqlens_q", cu_seqlens_q, batch_size + 1);
    FORK_CHECK_SHAPE("cu_seqlens_k", cu_seqlens_k, batch_size + 1);
    if (paged) {
        const Tensor &block_table = call.block_table;
        const int64_t num_blocks = k.size(0), page_block_size = k.size(1);
        check_pages(block_table, k, v, q);
        const int64_t max_num_blocks_per_seq = block_table.size(1);
        FORK_CHECK_SHAPE("k", k, num_blocks, page_block_size, num_heads_k, head_size);
        FORK_CHECK_SHAPE("v", v, num_blocks, page_block_size, num_heads_k, head_size);
        FORK_CHECK_SHAPE("block_table", block_table, batch_size, max_num_blocks_per_seq);
    } else {
        const int64_t total_k = k.size(0);
        FORK_CHECK_SHAPE("k", k, total_k, num_heads_k, head_size);
        FORK_CHECK_SHAPE("v", v, total_k, num_heads_k, head_size);
    }
    const int64_t total_q = q.size(0), all_keys = paged ? 0 : k.size(0);  // a table's are as many as it has
    check_tokens(call, "q", total_q, std::min<int64_t>(total_q, call.max_seqlen_q), "k", all_keys,
        std::min<int64_t>(all_keys, call.max_seqlen_k));
    if (seqused_k.given()) {
        check_table("seqused_k", seqused_k, q.device);
        FORK_CHECK_SHAPE("seqused_k", seqused_k, batch_size);
    }
    const char *const leftpad =
        check_leftpad(call.names->leftpad_k, call.leftpad_k, paged, batch_size, q.device);
    if (call.out.given()) { check_output("out", call.out, q); }
    check_scores(call, q, {batch_size, num_heads, num_heads_k, q.size(0), call.max_seqlen_k, true}, leftpad);
}

void run(const VarlenForward &given, const Host &host) {
    VarlenForward call = given;
    check(call);
    const OnGpu guard(call.q.device.index);
    check_gpu();
    set_results(call.out, call.lse, call.q.size(0) * call.q.size(1), host);
    const Tensor &q = call.q, &k = call.k;
    const bool paged = call.block_table.given();
    const int b = sequences(call.cu_seqlens_q), h = q.size(1), h_k = k.size(-2), d = q.size(2),
              total_q = q.size(0);
    if (fork_mode::checks_values()) {
        Tables tables;
        tables.cu_seqlens_q = call.cu_seqlens_q;
        tables.cu_seqlens_k = call.cu_seqlens_k;
        tables.total_q = total_q;
        tables.total_k = paged ? -1 : k.size(0);
        tables.lengths = call.seqused_k;
        tables.lengths_name = "seqused_k";
        tables.block_table = call.block_table;
        tables.pages = k.size(0);
        tables.page_size = paged ? k.size(1) : 0;
        tables.capacity = paged ? call.block_table.size(1) * k.size(1) : call.max_seqlen_k;
        Scratch scratch;
        check_values(tables, scratch, host);
    }
    if (!has_rows(q, b) || call.max_seqlen_q == 0) {  // then all rows are of no sequence
        if (host.measured == nullptr) {
            fill(call.out, 0.f, host.stream);
            fill(call.lse, call.zero_tensors ? -kInfinity : 0.f, host.stream);
            if (call.probabilities.given()) { fill(call.probabilities, 0.f, host.stream); }
        }
        return;
    }
    tidy_causal(call, call.max_seqlen_q == 1 && total_q <= b);
    const bool swapped = swaps_groups(call, call.max_seqlen_q == 1 && total_q == b, h, h_k);
    const int groups = swapped ? h / h_k : 1;
    const int split_size = split_size_of(call, host, d, call.leftpad_k.given());
    tidy_windows(call, split_size, call.max_seqlen_k);
    // No sequence is longer than all; a mask and a bias are as wide as the call says. With the mode off the
    // longest key length that is named decides where upstream splits keys.
    const bool scores = call.attn_mask.given() || call.attn_bias.given();
    const int64_t all_keys = paged ? call.block_table.size(1) * k.size(1) : k.size(0);
    const int seqlen_q = named_length(call, call.max_seqlen_q, scores ? kMostTokens : total_q),
              seqlen_k =
                  named_length(call, call.max_seqlen_k, scores || split_size == 0 ? kMostTokens : all_keys);

    Flash_fwd_params params{};
    set_params(params, call, {b, swapped ? groups : seqlen_q, seqlen_k, swapped ? h_k : h, h_k, d},
        q.dtype == Dtype::bf16, swapped ? groups_as_rows(q, groups) : rows_of(q), rows_of(k), rows_of(call.v),
        swapped ? groups_as_rows(call.out, groups) : rows_of(call.out), call.lse.as<float>());
    params.unpadded_lse = true;
    params.seqlenq_ngroups_swapped = swapped;
    params.total_q = swapped ? total_q * groups : total_q;
    params.fork.packed_rows = swapped || call.zero_tensors ? 0 : total_q;
    if (call.probabilities.given()) {
        params.seqlen_q_rounded = rounded(call.max_seqlen_q, 128);
        params.seqlen_k_rounded = rounded(call.max_seqlen_k, 128);
    }
    params.cu_seqlens_q = swapped ? nullptr : call.cu_seqlens_q.as<int>();
    params.cu_seqlens_k = call.cu_seqlens_k.as<int>();
    if (call.seqused_k.given()) { params.seqused_k = call.seqused_k.as<int>(); }
    if (call.leftpad_k.given()) { params.leftpad_k = call.leftpad_k.as<int>(); }
    fork_split::set_params(params, split_size, call.window_left, call.window_right);
    set_scores(params, call, {b, h, h_k, total_q, call.max_seqlen_k, true}, groups);
    if (paged) {
        params.block_table = call.block_table.as<int>();
        params.block_table_batch_stride = call.block_table.stride(0);
        params.page_block_size = k.size(1);
        params.fork.page_shift = page_shift(k, call.v);
    }
    set_alibi(params, call);
    Scratch scratch;
    // Upstream splits packed calls for single queries alone.
    if (swapped || split_size > 0) { set_splits(params, scratch, host, call.p_dropout, 0); }
    set_dropout(params, call, call.philox, call.probabilities, call.rng_state);
    set_sink(params, call, swapped);
    if (host.measured != nullptr) { return; }
    if (call.zero_tensors) {
        fill(call.out, 0.f, host.stream);
        fill(call.lse, -kInfinity, host.stream);
        if (call.probabilities.given()) { fill(call.probabilities, 0.f, host.stream); }
    }
    if (call.max_seqlen_k > 0) {
        run_forward(params, host.stream, paged);
    } else {
        fill_keyless(call.out, call.lse, host);
    }
}

namespace {

void check_new_keys(const CacheForward &call, int64_t seqlen_k) {
    const Tensor &q = call.q, &k = call.k, &v = call.v;
    const char *const k_name = call.names->k_new, *const v_name = call.names->v_new;
    FORK_CHECK(k.given(), v_name, " is given without ", k_name);
    FORK_CHECK(v.given(), k_name, " is given without ", v_name);
    FORK_CHECK(call.seqlens_k.given(), k_name, " is given without ", call.names->seqlens_k,
        ", which says where it is appended");
    check_rank(k_name, k, 4, "(batch_size, seqlen_new, num_heads_k, head_size)");
    check_rank(v_name, v, 4, "(batch_size, seqlen_new, num_heads_k, head_size)");
    const int64_t batch_size = q.size(0), seqlen_new = k.size(1), num_heads_k = call.kcache.size(2),
                  head_size = q.size(3);
    check_dtypes(q, {{k_name, &k}, {v_name, &v}});
    for (const auto &[name, tensor] : {std::make_pair(k_name, &k), std::make_pair(v_name, &v)}) {
        check_device(name, *tensor, q.device);
        check_rows(name, *tensor);
        FORK_CHECK_SHAPE(name, *tensor, batch_size, seqlen_new, num_heads_k, head_size);
    }
    FORK_CHECK(
        seqlen_new <= seqlen_k, k_name, " has ", seqlen_new, " tokens; the cache has room for ", seqlen_k);
    FORK_CHECK(q.size(1) <= seqlen_k, "q has ", q.size(1), " tokens, and ", k_name,
        " is appended to a cache that has room for ", seqlen_k);
    FORK_CHECK_VALUE(q.elements() > 0 || k.elements() == 0, "q has no queries, so nothing appends ", k_name,
        " to the cache: give at least one query, or no ", k_name);
}

void check_rotary(const CacheForward &call, int64_t seqlen_k) {
    const Tensor &rotary_cos = call.rotary_cos, &rotary_sin = call.rotary_sin, &q = call.q;
    const char *const k_name = call.names->k_new;
    const char *const given = rotary_cos.given() ? "rotary_cos" : "rotary_sin";
    FORK_CHECK(call.k.given(), given, " is given without ", k_name, ", the keys that it turns");
    FORK_CHECK(rotary_cos.given(), "rotary_sin is given without rotary_cos");
    FORK_CHECK(rotary_sin.given(), "rotary_cos is given without rotary_sin");
    check_rank("rotary_cos", rotary_cos, 2, "(seqlen_rotary, rotary_dim / 2)");
    check_rank("rotary_sin", rotary_sin, 2, "(seqlen_rotary, rotary_dim / 2)");
    const int64_t seqlen_rotary = rotary_cos.size(0), half_rotary_dim = rotary_cos.size(1);
    FORK_CHECK(half_rotary_dim * 2 <= q.size(3) && half_rotary_dim % 8 == 0, "rotary_cos has ",
        half_rotary_dim, " columns: twice as many must be a multiple of 16 up to the head dim, ", q.size(3));
    FORK_CHECK(seqlen_rotary >= seqlen_k, "rotary_cos has ", seqlen_rotary,
        " rows, fewer than the cache has tokens, ", seqlen_k);
    FORK_CHECK_SHAPE("rotary_sin", rotary_sin, seqlen_rotary, half_rotary_dim);
    check_dtypes(q, {{"rotary_cos", &rotary_cos}, {"rotary_sin", &rotary_sin}});
    for (const auto &[name, tensor] :
        {std::make_pair("rotary_cos", &rotary_cos), std::make_pair("rotary_sin", &rotary_sin)}) {
        check_device(name, *tensor, q.device);
        FORK_CHECK(tensor->contiguous(), name, " must be contiguous");
    }
}

int64_t capacity(const CacheForward &call) {
    return call.block_table.given() ? call.block_table.size(1) * call.kcache.size(1) : call.kcache.size(1);
}

}  // namespace

void check(const CacheForward &call) {
    const Tensor &q = call.q, &kcache = call.kcache, &vcache = call.vcache;
    const char *const k_name = call.names->kcache, *const v_name = call.names->vcache;
    const bool paged = call.block_table.given();
    const char *shape = paged ? "(num_blocks, page_block_size, num_heads_k, head_size)"
                              : "(batch_size_cache, seqlen_cache, num_heads_k, head_size)";
    check_rank("q", q, 4, "(batch_size, seqlen_q, num_heads, head_size)");
    check_rank(k_name, kcache, 4, shape);
    check_rank(v_name, vcache, 4, shape);
    check_inputs(q, k_name, kcache, v_name, vcache);
    const int64_t batch_size = q.size(0), num_heads = q.size(2), head_size = q.size(3),
                  num_heads_k = kcache.size(2);
    check_options(call);
    check_heads(call, q.device, batch_size, num_heads, num_heads_k, head_size);
    check_kernels(q, false);
    if (paged) {
        const Tensor &block_table = call.block_table;
        FORK_CHECK(!call.cache_batch_idx.given(), "cache_batch_idx does not go with block_table");
        check_pages(block_table, kcache, vcache, q);
        const int64_t max_num_blocks_per_seq = block_table.size(1);
        FORK_CHECK_SHAPE("block_table", block_table, batch_size, max_num_blocks_per_seq);
    } else {
        FORK_CHECK(call.cache_batch_idx.given() || kcache.size(0) >= batch_size, k_name, " has ",
            kcache.size(0), " sequences, fewer than q, which has ", batch_size,
            "; cache_batch_idx says which are whose");
    }
    const int64_t seqlen_k = capacity(call);
    for (const auto &[name, cache] : {std::make_pair(k_name, &kcache), std::make_pair(v_name, &vcache)}) {
        if (paged) {
            const int64_t num_blocks = kcache.size(0), page_block_size = kcache.size(1);
            FORK_CHECK_SHAPE(name, *cache, num_blocks, page_block_size, num_heads_k, head_size);
        } else {
            const int64_t batch_size_cache = kcache.size(0), seqlen_cache = kcache.size(1);
            FORK_CHECK_SHAPE(name, *cache, batch_size_cache, seqlen_cache, num_heads_k, head_size);
        }
    }
    check_tokens(call, "q", q.size(1), q.size(1), k_name, kcache.size(1), kcache.size(1));
    if (call.k.given() || call.v.given()) { check_new_keys(call, seqlen_k); }
    if (call.seqlens_k.given()) {
        check_table(call.names->seqlens_k, call.seqlens_k, q.device);
        FORK_CHECK_SHAPE(call.names->seqlens_k, call.seqlens_k, batch_size);
    }
    const char *const leftpad =
        check_leftpad(call.names->cache_leftpad, call.leftpad_k, paged, batch_size, q.device);
    if (call.rotary_cos.given() || call.rotary_sin.given()) { check_rotary(call, seqlen_k); }
    if (call.cache_batch_idx.given()) {
        check_table("cache_batch_idx", call.cache_batch_idx, q.device);
        FORK_CHECK_SHAPE("cache_batch_idx", call.cache_batch_idx, batch_size);
    }
    if (call.out.given()) { check_output("out", call.out, q); }
    check_scores(call, q, {batch_size, num_heads, num_heads_k, q.size(1), seqlen_k, false}, leftpad);
}

void run(const CacheForward &given, const Host &host) {
    CacheForward call = given;
    check(call);
    const OnGpu guard(call.q.device.index);
    check_gpu();
    set_results(call.out, call.lse, call.q.size(0) * call.q.size(1) * call.q.size(2), host);
    const Tensor &q = call.q, &k = call.k, &v = call.v;
    const bool paged = call.block_table.given(), single_query = q.size(1) == 1;
    const int b = q.size(0), h = q.size(2), h_k = call.kcache.size(2), d = q.size(3),
              seqlen_k = named_length(call, capacity(call), kMostTokens);
    if (fork_mode::checks_values()) {
        Tables tables;
        tables.lengths = call.seqlens_k;
        tables.lengths_name = "cache_seqlens";
        tables.capacity = capacity(call);
        tables.new_keys = k.given() ? k.size(1) : 0;
        tables.cache_batch_idx = call.cache_batch_idx;
        tables.sequences = call.kcache.size(0);
        tables.block_table = call.block_table;
        tables.pages = call.kcache.size(0);
        tables.page_size = call.kcache.size(1);
        Scratch scratch;
        check_values(tables, scratch, host);
    }
    if (!has_rows(q, b)) { return; }
    if (seqlen_k == 0) {
        if (host.measured == nullptr) { fill_keyless(call.out, call.lse, host); }
        return;
    }
    tidy_causal(call, single_query);
    const bool swapped = swaps_groups(call, single_query, h, h_k);
    const int groups = swapped ? h / h_k : 1;
    const int split_size = split_size_of(call, host, d, call.leftpad_k.given(), call.num_splits);
    tidy_windows(call, split_size, seqlen_k);

    Flash_fwd_params params{};
    set_params(params, call, {b, swapped ? groups : int(q.size(1)), seqlen_k, swapped ? h_k : h, h_k, d},
        q.dtype == Dtype::bf16, swapped ? groups_as_rows(q, groups) : rows_of(q), rows_of(call.kcache),
        rows_of(call.vcache), swapped ? groups_as_rows(call.out, groups) : rows_of(call.out),
        call.lse.as<float>());
    fork_split::set_params(params, split_size, call.window_left, call.window_right);
    set_scores(params, call, {b, h, h_k, q.size(1), seqlen_k, false}, groups);
    if (k.given()) {
        const Rows keys = rows_of(k), values = rows_of(v);
        params.seqlen_knew = k.size(1);
        // Without new keys, too, queries are turned.
        params.knew_ptr = k.elements() > 0 || !call.rotary_cos.given() ? keys.data : q.data;
        params.vnew_ptr = values.data;
        params.knew_batch_stride = keys.batch;
        params.vnew_batch_stride = values.batch;
        params.knew_row_stride = keys.row;
        params.vnew_row_stride = values.row;
        params.knew_head_stride = keys.head;
        params.vnew_head_stride = values.head;
    }
    if (call.seqlens_k.given()) { params.cu_seqlens_k = call.seqlens_k.as<int>(); }
    params.is_seqlens_k_cumulative = !call.seqlens_k.given();
    if (call.leftpad_k.given()) { params.leftpad_k = call.leftpad_k.as<int>(); }
    if (call.rotary_cos.given()) {
        params.rotary_dim = call.rotary_cos.size(1) * 2;
        params.fork.rotary_rows = call.rotary_cos.size(0);
        params.rotary_cos_ptr = call.rotary_cos.data;
        params.rotary_sin_ptr = call.rotary_sin.data;
        params.is_rotary_interleaved = call.is_rotary_interleaved;
    }
    if (call.cache_batch_idx.given()) { params.cache_batch_idx = call.cache_batch_idx.as<int>(); }
    set_alibi(params, call);
    if (paged) {
        params.block_table = call.block_table.as<int>();
        params.block_table_batch_stride = call.block_table.stride(0);
        params.page_block_size = call.kcache.size(1);
        params.fork.page_shift = page_shift(call.kcache, call.vcache);
    }
    Scratch scratch;
    set_splits(params, scratch, host, 0.f, call.num_splits);
    set_sink(params, call, swapped);
    if (host.measured != nullptr) { return; }
    // Only the split kernel appends, and reads a cache by an index or by pages.
    run_forward(params, host.stream, k.given() || call.cache_batch_idx.given() || paged);
}

}  // namespace core
}  // namespace FLASH_NAMESPACE

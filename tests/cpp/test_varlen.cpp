// Packed sequences and caches.

#include <algorithm>
#include <cmath>
#include <tuple>

#include "harness.h"

using namespace harness;

namespace {

class Packed : public OnGpu {};
class Caches : public OnGpu {};

// One problem a sequence, in one call.
struct Sequences {
    Sequences(const Shape &of, std::vector<int> queries, std::vector<int> keys)
        : shape(of), len_q(std::move(queries)), len_k(std::move(keys)) {
        for (size_t i = 0; i < len_q.size(); ++i) {
            Shape own = shape;
            own.len_q = len_q[i];
            own.len_k = len_k[i];
            each.push_back(Inputs::draw(own, i + 1));
        }
    }
    static std::vector<int32_t> begins(const std::vector<int> &lengths) {
        std::vector<int32_t> made{0};
        for (const int length : lengths) { made.push_back(made.back() + length); }
        return made;
    }
    std::vector<float> joined(std::vector<float> Inputs::*which) const {
        std::vector<float> made;
        for (const Inputs &inputs : each) {
            made.insert(made.end(), (inputs.*which).begin(), (inputs.*which).end());
        }
        return made;
    }
    Shape shape;
    std::vector<int> len_q, len_k;
    std::vector<Inputs> each;
};

template<typename Element>
std::vector<Element> rows(const std::vector<Element> &all, int begin, int count, int each) {
    return {all.begin() + size_t(begin) * each, all.begin() + size_t(begin + count) * each};
}

void check_packed(const Sequences &all, int gap = 0) {
    const Shape &shape = all.shape;
    const std::vector<int32_t> begins_q = Sequences::begins(all.len_q),
                               begins_k = Sequences::begins(all.len_k);
    const int total_q = begins_q.back() + gap, total_k = begins_k.back() + gap, b = int(all.len_q.size());
    const auto array = [&](std::vector<float> content, int total, int heads) {
        content.resize(size_t(total) * heads * shape.d);
        return std::make_unique<Array>(bits(content, shape.dtype));
    };
    const auto q = array(all.joined(&Inputs::q), total_q, shape.h),
               k = array(all.joined(&Inputs::k), total_k, shape.h_k),
               v = array(all.joined(&Inputs::v), total_k, shape.h_k),
               dout = array(all.joined(&Inputs::dout), total_q, shape.h);
    const Array out(q->bytes()), dq(q->bytes()), dk(k->bytes()), dv(k->bytes()),
        lse(size_t(shape.h) * total_q * sizeof(float)), cu_q(begins_q), cu_k(begins_k);
    for (const Array *result : {&out, &dq, &dk, &dv, &lse}) { result->fill(0xff); }
    flash_attention_v2_forward_call forward;
    flash_attention_v2_backward_call backward;
    SUCCEEDS(flash_attention_v2_forward_defaults(&forward, sizeof(forward)));
    SUCCEEDS(flash_attention_v2_backward_defaults(&backward, sizeof(backward)));
    const auto described = [&](const Array &of, int total, int heads) {
        return tensor(of.data(), shape.dtype, {total, heads, shape.d});
    };
    forward.options.causal = backward.options.causal = shape.causal;
    forward.options.split_size = backward.options.split_size = shape.split_size;
    forward.q = backward.q = described(*q, total_q, shape.h);
    forward.k = backward.k = described(*k, total_k, shape.h_k);
    forward.v = backward.v = described(*v, total_k, shape.h_k);
    forward.out = backward.out = described(out, total_q, shape.h);
    forward.lse = backward.lse = tensor(lse.data(), kFloat, {shape.h, total_q});
    forward.cu_seqlens_q = backward.cu_seqlens_q = tensor(cu_q.data(), kInt, {b + 1});
    forward.cu_seqlens_k = backward.cu_seqlens_k = tensor(cu_k.data(), kInt, {b + 1});
    forward.max_seqlen_q = backward.max_seqlen_q = *std::max_element(all.len_q.begin(), all.len_q.end());
    forward.max_seqlen_k = backward.max_seqlen_k = *std::max_element(all.len_k.begin(), all.len_k.end());
    forward.zero_gaps = backward.zero_gaps = 1;
    backward.dout = described(*dout, total_q, shape.h);
    backward.dq = described(dq, total_q, shape.h);
    backward.dk = described(dk, total_k, shape.h_k);
    backward.dv = described(dv, total_k, shape.h_k);
    SUCCEEDS(flash_attention_v2_run_forward(&forward, nullptr));
    SUCCEEDS(flash_attention_v2_run_backward(&backward, nullptr));
    SUCCEEDS(cudaDeviceSynchronize());
    const std::vector<float> all_lse = lse.got<float>();
    for (int i = 0; i < b; ++i) {
        Results own;
        const int row = shape.h * shape.d, key = shape.h_k * shape.d;
        own.out = rows(out.got<uint16_t>(), begins_q[i], all.len_q[i], row);
        own.dq = rows(dq.got<uint16_t>(), begins_q[i], all.len_q[i], row);
        own.dk = rows(dk.got<uint16_t>(), begins_k[i], all.len_k[i], key);
        own.dv = rows(dv.got<uint16_t>(), begins_k[i], all.len_k[i], key);
        for (int h = 0; h < shape.h; ++h) {
            const std::vector<float> of_head = rows(all_lse, h * total_q + begins_q[i], all.len_q[i], 1);
            own.lse.insert(own.lse.end(), of_head.begin(), of_head.end());
        }
        expect_accurate(all.each[i], own, true);
    }
    if (gap == 0) { return; }
    for (const uint16_t element : rows(out.got<uint16_t>(), begins_q.back(), gap, shape.h * shape.d)) {
        ASSERT_EQ(element, 0) << "out in a row of no sequence";
    }
    for (const uint16_t element : rows(dk.got<uint16_t>(), begins_k.back(), gap, shape.h_k * shape.d)) {
        ASSERT_EQ(element, 0) << "dk in a row of no sequence";
    }
}

TEST_F(Packed, SequencesOfSeveralLengths) {
    for (const bool causal : {false, true}) {
        Shape shape;
        shape.causal = causal;
        shape.h = 2;
        shape.h_k = 1;
        NEEDS_KERNELS(shape, true);
        check_packed(Sequences(shape, {5, 64, 17}, {9, 64, 33}));
    }
}

TEST_F(Packed, RowsOfNoSequenceAreZero) {
    const Shape shape;
    NEEDS_KERNELS(shape, true);
    check_packed(Sequences(shape, {20, 3}, {20, 3}), 6);
}

// Without sequences, queries or keys nothing is launched, and all that is there is 0.
TEST_F(Packed, NothingToCompute) {
    Shape shape;
    shape.h_k = 1;
    NEEDS_KERNELS(shape, true);
    using Sums = std::vector<int32_t>;
    const std::pair<Sums, Sums> calls[] = {
        {{0}, {0}}, {{0, 0, 0}, {0, 3, 7}}, {{0, 3, 5}, {0, 0, 0}}, {{0, 0}, {0, 0}}};
    for (const auto &[sums_q, sums_k] : calls) {
        const int64_t b = int64_t(sums_q.size()) - 1, total_q = sums_q.back(), total_k = sums_k.back();
        const Array queries(sums_q), keys(sums_k);
        const std::vector<int64_t> q_sizes{total_q, shape.h, shape.d}, k_sizes{total_k, shape.h_k, shape.d};
        const size_t q_bytes = total_q * shape.h * shape.d * 2, k_bytes = total_k * shape.h_k * shape.d * 2;
        const Array q(q_bytes), k(k_bytes), v(k_bytes), out(q_bytes), dout(q_bytes), dq(q_bytes), dk(k_bytes),
            dv(k_bytes), lse(total_q * shape.h * sizeof(float));
        for (const Array *const array : {&out, &dq, &dk, &dv}) { array->fill(0xff); }
        flash_attention_v2_forward_call forward;
        flash_attention_v2_backward_call backward;
        SUCCEEDS(flash_attention_v2_forward_defaults(&forward, sizeof(forward)));
        SUCCEEDS(flash_attention_v2_backward_defaults(&backward, sizeof(backward)));
        const auto set = [&](auto &call) {
            call.q = tensor(q.data(), kHalf, q_sizes);
            call.k = tensor(k.data(), kHalf, k_sizes);
            call.v = tensor(v.data(), kHalf, k_sizes);
            call.out = tensor(out.data(), kHalf, q_sizes);
            call.lse = tensor(lse.data(), kFloat, {shape.h, total_q});
            call.cu_seqlens_q = tensor(queries.data(), kInt, {b + 1});
            call.cu_seqlens_k = tensor(keys.data(), kInt, {b + 1});
            call.max_seqlen_q = int32_t(total_q);
            call.max_seqlen_k = int32_t(total_k);
        };
        set(forward);
        set(backward);
        backward.dout = tensor(dout.data(), kHalf, q_sizes);
        backward.dq = tensor(dq.data(), kHalf, q_sizes);
        backward.dk = tensor(dk.data(), kHalf, k_sizes);
        backward.dv = tensor(dv.data(), kHalf, k_sizes);
        SUCCEEDS(flash_attention_v2_run_forward(&forward, nullptr));
        SUCCEEDS(flash_attention_v2_run_backward(&backward, nullptr));
        SUCCEEDS(cudaDeviceSynchronize());
        for (const Array *const array : {&out, &dq, &dk, &dv}) {
            for (const uint16_t element : array->got<uint16_t>()) { EXPECT_EQ(element, 0); }
        }
    }
    flash_attention_v2_forward_call forward;
    SUCCEEDS(flash_attention_v2_forward_defaults(&forward, sizeof(forward)));
    const Array some(1024);
    forward.q = forward.out = tensor(some.data(), kHalf, {0, shape.h, shape.d});
    forward.k = forward.v = tensor(some.data(), kHalf, {0, shape.h_k, shape.d});
    forward.cu_seqlens_q = forward.cu_seqlens_k = tensor(some.data(), kInt, {0});
    EXPECT_EQ(flash_attention_v2_run_forward(&forward, nullptr), cudaErrorInvalidValue);
    EXPECT_NE(std::string(flash_attention_v2_last_error()).find("cu_seqlens_q is empty"), std::string::npos);
}

// Queries on a cache of `capacity` keys, of which each sequence has its own number in use; slots behind them
// hold NaN. Pages, where there are, come in another order than the tokens.
struct Cache {
    Cache(const Shape &of, std::vector<int> used, int new_keys, int page, int capacity)
        : shape(of),
          lengths(std::move(used)),
          added(new_keys),
          page_size(page),
          pages((capacity + page - 1) / page),
          all(of, std::vector<int>(lengths.size(), of.len_q), totals()) {}
    std::vector<int> totals() const {
        std::vector<int> made = lengths;
        for (int &length : made) { length += added; }
        return made;
    }
    // page (or place) of a token of a sequence
    size_t place(int b, int token) const {
        const int n = pages * int(lengths.size());
        const int own = page_of(b, token / page_size) % n;
        return size_t(own) * page_size + token % page_size;
    }
    int page_of(int b, int index) const {
        return paged() ? (int(lengths.size()) * index + b) : b * pages + index;
    }
    bool paged() const { return pages > 1; }

    void check(int split_size = 0) const {
        const int b = int(lengths.size()), d = shape.d, row = shape.h_k * d;
        const size_t slots = size_t(pages) * b * page_size;
        std::vector<float> k(slots * row, NAN), v(k), k_new, v_new;
        for (int i = 0; i < b; ++i) {
            const Inputs &own = all.each[i];
            for (int token = 0; token < lengths[i]; ++token) {
                std::copy_n(own.k.begin() + size_t(token) * row, row, k.begin() + place(i, token) * row);
                std::copy_n(own.v.begin() + size_t(token) * row, row, v.begin() + place(i, token) * row);
            }
            k_new.insert(k_new.end(), own.k.begin() + size_t(lengths[i]) * row, own.k.end());
            v_new.insert(v_new.end(), own.v.begin() + size_t(lengths[i]) * row, own.v.end());
        }
        const Array q(bits(all.joined(&Inputs::q), shape.dtype)), k_cache(bits(k, shape.dtype)),
            v_cache(bits(v, shape.dtype)), k_added(bits(k_new, shape.dtype)),
            v_added(bits(v_new, shape.dtype)), out(q.bytes()),
            lse(size_t(b) * shape.h * shape.len_q * sizeof(float)),
            used(std::vector<int32_t>(lengths.begin(), lengths.end()));
        out.fill(0xff);
        flash_attention_v2_forward_call call;
        SUCCEEDS(flash_attention_v2_forward_defaults(&call, sizeof(call)));
        call.options.causal = shape.causal;
        call.options.split_size = split_size;
        call.q = tensor(q.data(), shape.dtype, {b, shape.len_q, shape.h, d});
        call.out = tensor(out.data(), shape.dtype, {b, shape.len_q, shape.h, d});
        call.lse = tensor(lse.data(), kFloat, {b, shape.h, shape.len_q});
        const std::vector<int64_t> sizes = paged() ? std::vector<int64_t>{pages * b, page_size, shape.h_k, d}
                                                   : std::vector<int64_t>{b, page_size, shape.h_k, d};
        call.k = tensor(k_cache.data(), shape.dtype, sizes);
        call.v = tensor(v_cache.data(), shape.dtype, sizes);
        call.cache_seqlens = tensor(used.data(), kInt, {b});
        if (added > 0) {
            call.k_new = tensor(k_added.data(), shape.dtype, {b, added, shape.h_k, d});
            call.v_new = tensor(v_added.data(), shape.dtype, {b, added, shape.h_k, d});
        }
        std::vector<int32_t> table;
        for (int i = 0; i < b; ++i) {
            for (int index = 0; index < pages; ++index) { table.push_back(page_of(i, index)); }
        }
        const Array table_there(table);
        if (paged()) { call.block_table = tensor(table_there.data(), kInt, {b, pages}); }
        SUCCEEDS(flash_attention_v2_run_forward(&call, nullptr));
        SUCCEEDS(cudaDeviceSynchronize());
        const std::vector<float> all_lse = lse.got<float>();
        for (int i = 0; i < b; ++i) {
            Results own;
            own.out = rows(out.got<uint16_t>(), i * shape.len_q, shape.len_q, shape.h * d);
            own.lse = rows(all_lse, i * shape.h, shape.h, shape.len_q);
            expect_accurate(all.each[i], own, false);
            const Bits stored = k_cache.got<uint16_t>(), right = bits(all.each[i].k, shape.dtype);
            for (int token = 0; token < lengths[i] + added; ++token) {
                ASSERT_EQ(rows(stored, int(place(i, token)), 1, row), rows(right, token, 1, row))
                    << "key " << token << " of sequence " << i << " in the cache";
            }
        }
    }

    Shape shape;
    std::vector<int> lengths;
    int added, page_size, pages;
    Sequences all;
};

Shape decoding(int queries, bool causal) {
    Shape shape;
    shape.h = 4;
    shape.h_k = 2;
    shape.len_q = queries;
    shape.causal = causal;
    return shape;
}

TEST_F(Caches, DecodeOnOneAndOnSeveralQueries) {
    NEEDS_KERNELS(decoding(1, false), false);
    Cache(decoding(1, false), {30, 77}, 0, 96, 96).check();
    Cache(decoding(5, true), {30, 77}, 0, 96, 96).check();
}

TEST_F(Caches, NewKeysAreAppendedFirst) {
    NEEDS_KERNELS(decoding(1, true), false);
    Cache(decoding(1, true), {30, 77}, 1, 96, 96).check();
    Cache(decoding(3, true), {0, 50}, 3, 96, 96).check();
}

TEST_F(Caches, InPages) {
    NEEDS_KERNELS(decoding(1, true), false);
    Cache(decoding(1, true), {300, 77}, 0, 256, 512).check();
    Cache(decoding(2, true), {254, 400}, 2, 256, 512).check();
    Cache(decoding(1, true), {300, 77}, 1, 256, 512).check(128);
}

TEST_F(Caches, NothingToCompute) {
    Shape shape = decoding(1, false);
    NEEDS_KERNELS(shape, false);
    for (const auto &[b, queries, capacity, pages] :
        {std::tuple(0, 1, 64, false), std::tuple(2, 0, 64, false), std::tuple(2, 3, 0, false),
            std::tuple(0, 1, 64, true), std::tuple(2, 1, 0, true)}) {
        const Array used(std::vector<int32_t>(size_t(b), 0)), memory(size_t(1) << 16);
        memory.fill(0xff);
        flash_attention_v2_forward_call call;
        SUCCEEDS(flash_attention_v2_forward_defaults(&call, sizeof(call)));
        call.q = call.out = tensor(memory.data(), kHalf, {b, queries, shape.h, shape.d});
        const std::vector<int64_t> sizes{pages ? 4 : b, pages ? 16 : capacity, shape.h_k, shape.d};
        call.k = call.v = tensor(memory.as<char>() + (1 << 15), kHalf, sizes);
        call.cache_seqlens = tensor(used.data(), kInt, {b});
        if (pages) { call.block_table = tensor(memory.data(), kInt, {b, capacity / 16}); }
        SUCCEEDS(flash_attention_v2_run_forward(&call, nullptr));
        SUCCEEDS(cudaDeviceSynchronize());
        const std::vector<uint16_t> out = memory.got<uint16_t>();
        for (int i = 0; i < b * queries * shape.h * shape.d; ++i) { ASSERT_EQ(out[i], 0); }
        if (queries > 0 || b == 0) { continue; }
        call.k_new = call.v_new = tensor(memory.data(), kHalf, {b, 1, shape.h_k, shape.d});
        EXPECT_EQ(flash_attention_v2_run_forward(&call, nullptr), cudaErrorInvalidValue);
        EXPECT_STREQ(flash_attention_v2_last_error(),
            "q has no queries, so nothing appends k_new to the cache: give at least one query, or no k_new");
    }
}

TEST_F(Caches, RotaryTablesOfNoAngleTurnNothing) {
    const Shape shape = decoding(1, true);
    NEEDS_KERNELS(shape, false);
    const int capacity = 64;
    const Array q(bits(drawn(size_t(shape.h) * shape.d, kHalf, 1), kHalf)),
        k(size_t(capacity) * shape.h_k * shape.d * 2), v(k.bytes()), out(q.bytes()), turned(q.bytes()),
        k_new(bits(drawn(size_t(shape.h_k) * shape.d, kHalf, 2), kHalf)),
        v_new(bits(drawn(size_t(shape.h_k) * shape.d, kHalf, 3), kHalf)), length(std::vector<int32_t>{0}),
        cos(bits(std::vector<float>(size_t(capacity) * shape.d / 2, 1.f), kHalf)),
        sin(bits(std::vector<float>(size_t(capacity) * shape.d / 2, 0.f), kHalf));
    flash_attention_v2_forward_call call;
    SUCCEEDS(flash_attention_v2_forward_defaults(&call, sizeof(call)));
    call.q = tensor(q.data(), kHalf, {1, 1, shape.h, shape.d});
    call.out = tensor(out.data(), kHalf, {1, 1, shape.h, shape.d});
    call.k = tensor(k.data(), kHalf, {1, capacity, shape.h_k, shape.d});
    call.v = tensor(v.data(), kHalf, {1, capacity, shape.h_k, shape.d});
    call.k_new = tensor(k_new.data(), kHalf, {1, 1, shape.h_k, shape.d});
    call.v_new = tensor(v_new.data(), kHalf, {1, 1, shape.h_k, shape.d});
    call.cache_seqlens = tensor(length.data(), kInt, {1});
    SUCCEEDS(flash_attention_v2_run_forward(&call, nullptr));
    call.out.data = turned.data();
    call.rotary_cos = tensor(cos.data(), kHalf, {capacity, shape.d / 2});
    call.rotary_sin = tensor(sin.data(), kHalf, {capacity, shape.d / 2});
    SUCCEEDS(flash_attention_v2_run_forward(&call, nullptr));
    SUCCEEDS(cudaDeviceSynchronize());
    EXPECT_EQ(turned.got<uint16_t>(), out.got<uint16_t>());
    // One key alone, so its value.
    const Bits value = v_new.got<uint16_t>();
    EXPECT_EQ(rows(out.got<uint16_t>(), 0, 1, shape.d), rows(value, 0, 1, shape.d));
}

}  // namespace

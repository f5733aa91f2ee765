#include "harness.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

namespace harness {

bool emulated() {
    static const bool is = [] {
        const char *const value = std::getenv("FLASH_ATTENTION_V2_EMULATED");
        return value != nullptr && std::string(value) == "1";
    }();
    return is;
}

int devices() {
    static const int count = [] {
        int found = 0;
        return cudaGetDeviceCount(&found) == cudaSuccess ? found : (cudaGetLastError(), 0);
    }();
    return count;
}

int built_head_dim() {
    static const int found = [] {
        for (const int d : {32, 64, 96, 128, 192, 256}) {
            if (flash_attention_v2_has_kernels(d, kHalf, 0) && flash_attention_v2_has_kernels(d, kHalf, 1)) {
                return d;
            }
        }
        return 0;
    }();
    return found;
}

namespace {

float as_half(float number) { return __half2float(__float2half_rn(number)); }
float as_bfloat(float number) { return __bfloat162float(__float2bfloat16_rn(number)); }

template<typename To, typename From>
To same_bits(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "bits of one size");
    To to;
    std::memcpy(static_cast<void *>(&to), &from, sizeof(to));
    return to;
}

constexpr char kCanary = 0x5a;

}  // namespace

Rounding rounding(int32_t dtype) { return dtype == kHalf ? as_half : as_bfloat; }

Bits bits(const std::vector<float> &numbers, int32_t dtype) {
    Bits made(numbers.size());
    std::transform(numbers.begin(), numbers.end(), made.begin(), [&](float number) {
        return dtype == kHalf ? same_bits<uint16_t>(__float2half_rn(number))
                              : same_bits<uint16_t>(__float2bfloat16_rn(number));
    });
    return made;
}

std::vector<float> numbers(const Bits &bits, int32_t dtype) {
    std::vector<float> made(bits.size());
    std::transform(bits.begin(), bits.end(), made.begin(), [&](uint16_t each) {
        return dtype == kHalf ? __half2float(same_bits<__half>(each))
                              : __bfloat162float(same_bits<__nv_bfloat16>(each));
    });
    return made;
}

std::vector<float> drawn(size_t count, int32_t dtype, uint64_t seed) {
    std::mt19937_64 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<float> made(count);
    for (float &number : made) {
        number = dtype == kFloat ? normal(generator) : rounding(dtype)(normal(generator));
    }
    return made;
}

// An emulated GPU faults where a kernel leaves an allocation, so canaries would only hide that.
Array::Array(size_t bytes) : bytes_(bytes), around_(emulated() ? 0 : 256) {
    void *made = nullptr;
    EXPECT_EQ(cudaMalloc(&made, bytes + 2 * around_ + (bytes == 0)), cudaSuccess);
    whole_ = static_cast<char *>(made);
    data_ = whole_ + around_;
    if (around_ > 0) { EXPECT_EQ(cudaMemset(whole_, kCanary, bytes + 2 * around_), cudaSuccess); }
}

Array::~Array() {
    if (around_ > 0) {
        std::vector<char> found(around_);
        for (const size_t at : {size_t(0), around_ + bytes_}) {
            EXPECT_EQ(cudaMemcpy(found.data(), whole_ + at, around_, cudaMemcpyDeviceToHost), cudaSuccess);
            EXPECT_TRUE(std::all_of(found.begin(), found.end(), [](char c) { return c == kCanary; }))
                << "something was written " << (at == 0 ? "before" : "behind") << " an array of " << bytes_
                << " bytes";
        }
    }
    cudaFree(whole_);
}

flash_attention_v2_tensor tensor(const void *data, int32_t dtype, const std::vector<int64_t> &sizes) {
    flash_attention_v2_tensor made{};
    made.data = const_cast<void *>(data);
    made.dtype = dtype;
    made.rank = int32_t(sizes.size());
    int64_t stride = 1;
    for (int i = made.rank - 1; i >= 0; --i) {
        made.sizes[i] = sizes[i];
        made.strides[i] = stride;
        stride *= sizes[i];
    }
    return made;
}

std::string Shape::told() const {
    std::string text = "b" + std::to_string(b) + " h" + std::to_string(h) + "/" + std::to_string(h_k) + " d"
        + std::to_string(d) + " q" + std::to_string(len_q) + " k" + std::to_string(len_k)
        + (dtype == kHalf ? " fp16" : " bf16") + (causal ? " causal" : "");
    if (window_left >= 0 || window_right >= 0) {
        text += " window " + std::to_string(window_left) + "," + std::to_string(window_right);
    }
    if (softcap > 0) { text += " softcap"; }
    if (dropout > 0) { text += " dropout"; }
    if (alibi) { text += " alibi"; }
    if (split_size > 0) { text += " split " + std::to_string(split_size); }
    return text + (heads_first ? " heads first" : "");
}

double Scores::at(int b, int h, int i, int j) const {
    const int64_t index[] = {b, h, i, j};
    int64_t place = 0;
    for (int n = 0; n < 4; ++n) { place = place * sizes[n] + (sizes[n] == 1 ? 0 : index[n]); }
    return numbers[place];
}

Inputs Inputs::draw(const Shape &shape, uint64_t seed) {
    Inputs made;
    made.shape = shape;
    const size_t rows = size_t(shape.b) * shape.len_q * shape.h * shape.d;
    const size_t keys = size_t(shape.b) * shape.len_k * shape.h_k * shape.d;
    made.q = drawn(rows, shape.dtype, 4 * seed);
    made.k = drawn(keys, shape.dtype, 4 * seed + 1);
    made.v = drawn(keys, shape.dtype, 4 * seed + 2);
    made.dout = drawn(rows, shape.dtype, 4 * seed + 3);
    for (int head = 0; shape.alibi && head < shape.h; ++head) {
        made.slopes.push_back(std::exp2(-8.f * float(head + 1) / float(shape.h)));
    }
    return made;
}

bool Results::operator==(const Results &other) const {
    const auto same = [](const std::vector<float> &a, const std::vector<float> &b) {
        return a.size() == b.size()
            && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
    };
    return out == other.out && dq == other.dq && dk == other.dk && dv == other.dv && same(lse, other.lse)
        && same(dbias, other.dbias);
}

namespace {

// From (b, length, heads, d) to how it lies, and back.
Bits swapped(const Bits &content, int b, int first, int second, int d) {
    Bits made(content.size());
    for (int n = 0; n < b; ++n) {
        for (int i = 0; i < first; ++i) {
            for (int j = 0; j < second; ++j) {
                const auto *const from = content.data() + ((size_t(n) * first + i) * second + j) * d;
                std::copy(from, from + d, made.data() + ((size_t(n) * second + j) * first + i) * d);
            }
        }
    }
    return made;
}

Bits lying(const std::vector<float> &content, const Shape &shape, int length, int heads) {
    const Bits made = bits(content, shape.dtype);
    return shape.heads_first ? swapped(made, shape.b, length, heads, shape.d) : made;
}

}  // namespace

Calls::Calls(const Inputs &inputs)
    : inputs_(inputs),
      q_(lying(inputs.q, inputs.shape, inputs.shape.len_q, inputs.shape.h)),
      k_(lying(inputs.k, inputs.shape, inputs.shape.len_k, inputs.shape.h_k)),
      v_(lying(inputs.v, inputs.shape, inputs.shape.len_k, inputs.shape.h_k)),
      dout_(lying(inputs.dout, inputs.shape, inputs.shape.len_q, inputs.shape.h)),
      out_(q_.bytes()),
      lse_(size_t(inputs.shape.b) * inputs.shape.h * inputs.shape.len_q * sizeof(float)),
      dq_(q_.bytes()),
      dk_(k_.bytes()),
      dv_(v_.bytes()) {
    const Shape &shape = inputs.shape;
    EXPECT_EQ(flash_attention_v2_forward_defaults(&forward, sizeof(forward)), cudaSuccess);
    EXPECT_EQ(flash_attention_v2_backward_defaults(&backward, sizeof(backward)), cudaSuccess);
    flash_attention_v2_options &options = forward.options;
    options.softmax_scale = shape.scale;
    options.softcap = shape.softcap;
    options.dropout = shape.dropout;
    options.causal = shape.causal;
    options.window_left = shape.window_left;
    options.window_right = shape.window_right;
    options.split_size = shape.split_size;
    options.seed = shape.seed;
    if (shape.alibi) {
        slopes_ = std::make_unique<Array>(inputs.slopes);
        options.alibi_slopes = tensor(slopes_->data(), kFloat, {shape.h});
    }
    if (inputs.mask.given()) {
        mask_ = std::make_unique<Array>(
            std::vector<uint8_t>(inputs.mask.numbers.begin(), inputs.mask.numbers.end()));
        options.mask = tensor(mask_->data(), kBool, inputs.mask.sizes);
    }
    if (inputs.bias.given()) {
        const bool is_float = inputs.bias.dtype == kFloat;
        bias_ = is_float ? std::make_unique<Array>(inputs.bias.numbers)
                         : std::make_unique<Array>(bits(inputs.bias.numbers, inputs.bias.dtype));
        dbias_ = std::make_unique<Array>(bias_->bytes());
        options.bias = tensor(bias_->data(), inputs.bias.dtype, inputs.bias.sizes);
        backward.dbias = tensor(dbias_->data(), inputs.bias.dtype, inputs.bias.sizes);
    }
    backward.options = options;
    forward.q = backward.q = described(q_, shape.len_q, shape.h);
    forward.k = backward.k = described(k_, shape.len_k, shape.h_k);
    forward.v = backward.v = described(v_, shape.len_k, shape.h_k);
    forward.out = backward.out = described(out_, shape.len_q, shape.h);
    forward.lse = backward.lse = tensor(lse_.data(), kFloat, {shape.b, shape.h, shape.len_q});
    backward.dout = described(dout_, shape.len_q, shape.h);
    backward.dq = described(dq_, shape.len_q, shape.h);
    backward.dk = described(dk_, shape.len_k, shape.h_k);
    backward.dv = described(dv_, shape.len_k, shape.h_k);
    poison();
}

flash_attention_v2_tensor Calls::described(const Array &array, int length, int heads) const {
    const Shape &shape = inputs_.shape;
    flash_attention_v2_tensor made = tensor(array.data(), shape.dtype, {shape.b, length, heads, shape.d});
    if (shape.heads_first) {
        made.strides[1] = shape.d;
        made.strides[2] = int64_t(length) * shape.d;
    }
    return made;
}

Bits Calls::ordered(const Array &array, int length, int heads) const {
    const Bits content = array.got<uint16_t>();
    const Shape &shape = inputs_.shape;
    return shape.heads_first ? swapped(content, shape.b, heads, length, shape.d) : content;
}

void Calls::poison() const {
    for (const Array *array : {&out_, &lse_, &dq_, &dk_, &dv_}) { array->fill(0xff); }
    if (dbias_) { dbias_->fill(0xff); }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // other streams do not wait for it
}

cudaError_t Calls::run_forward(cudaStream_t stream) const {
    return flash_attention_v2_run_forward(&forward, stream);
}
cudaError_t Calls::run_backward(cudaStream_t stream) const {
    return flash_attention_v2_run_backward(&backward, stream);
}

Results Calls::results(bool with_gradients) const {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const Shape &shape = inputs_.shape;
    Results made;
    made.out = ordered(out_, shape.len_q, shape.h);
    made.lse = lse_.got<float>();
    if (!with_gradients) { return made; }
    made.dq = ordered(dq_, shape.len_q, shape.h);
    made.dk = ordered(dk_, shape.len_k, shape.h_k);
    made.dv = ordered(dv_, shape.len_k, shape.h_k);
    if (dbias_) {
        made.dbias = inputs_.bias.dtype == kFloat ? dbias_->got<float>()
                                                  : numbers(dbias_->got<uint16_t>(), inputs_.bias.dtype);
    }
    return made;
}

bool has_kernels(const Shape &shape, bool backward) {
    return flash_attention_v2_has_kernels(shape.d, shape.dtype, 0)
        && (!backward || flash_attention_v2_has_kernels(shape.d, shape.dtype, 1));
}

namespace {

template<typename Element>
std::vector<Element> part(const std::vector<Element> &whole, int b, int index) {
    const size_t each = whole.size() / b;
    return {whole.begin() + index * each, whole.begin() + (index + 1) * each};
}

}  // namespace

reference::Problem sequence(const Inputs &inputs, int b, bool backward) {
    const Shape &shape = inputs.shape;
    reference::Problem made;
    made.heads = shape.h;
    made.heads_k = shape.h_k;
    made.dim = shape.d;
    made.len_q = shape.len_q;
    made.len_k = shape.len_k;
    made.q = part(inputs.q, shape.b, b);
    made.k = part(inputs.k, shape.b, b);
    made.v = part(inputs.v, shape.b, b);
    if (backward) { made.dout = part(inputs.dout, shape.b, b); }
    made.causal = shape.causal;
    made.window_left = shape.window_left;
    made.window_right = shape.window_right;
    made.scale = shape.scale;
    made.softcap = shape.softcap;
    made.slopes = inputs.slopes;
    if (inputs.mask.given()) {
        made.sees = [&inputs, b](int h, int i, int j) { return inputs.mask.at(b, h, i, j) != 0; };
    }
    if (inputs.bias.given()) {
        made.bias = [&inputs, b](int h, int i, int j) { return inputs.bias.at(b, h, i, j); };
    }
    return made;
}

Allowed compared(const std::vector<float> &got, const std::vector<double> &exact,
    const std::vector<double> &plain, int32_t dtype) {
    EXPECT_EQ(got.size(), exact.size());
    double error = 0, others = 0, largest = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
        // Not std::max, which would pass over a NaN.
        const double off = std::abs(double(got[i]) - exact[i]);
        if (!(off <= error)) { error = off; }
        others = std::max(others, std::abs(plain[i] - exact[i]));
        largest = std::max(largest, std::abs(exact[i]));
    }
    const int digits = dtype == kHalf ? 11 : dtype == kBfloat ? 8 : 20;
    const double unit = std::ldexp(1.0, std::max(std::ilogb(std::max(largest, 1e-30)) + 1, -13) - digits);
    return {error, 2 * others + std::max(unit, 1e-5)};
}

namespace {

void expect(const char *name, const Allowed &found, const std::string &where) {
    EXPECT_TRUE(found.fits()) << name << " is off by " << found.error << ", plain operations allow "
                              << found.allowed << "; " << where;
}

// The gradient of a bias, summed over what shares it.
std::vector<double> summed(
    const Scores &bias, const std::vector<std::vector<double>> &sequences, const Shape &shape) {
    int64_t count = 1;
    for (const int64_t size : bias.sizes) { count *= size; }
    std::vector<double> sums(count);
    const auto place = [&](int n, int index) { return bias.sizes[n] == 1 ? 0 : index; };
    for (int b = 0; b < shape.b; ++b) {
        for (int h = 0; h < shape.h; ++h) {
            for (int i = 0; i < shape.len_q; ++i) {
                for (int j = 0; j < shape.len_k; ++j) {
                    const int64_t at =
                        ((place(0, b) * bias.sizes[1] + place(1, h)) * bias.sizes[2] + place(2, i))
                            * bias.sizes[3]
                        + place(3, j);
                    sums[at] += sequences[b][(size_t(h) * shape.len_q + i) * shape.len_k + j];
                }
            }
        }
    }
    return sums;
}

}  // namespace

void expect_accurate(
    const Inputs &inputs, const Results &results, bool backward, const Kept &kept, bool half_lse) {
    const Shape &shape = inputs.shape;
    std::vector<std::vector<double>> exact_bias, plain_bias;
    for (int b = 0; b < shape.b; ++b) {
        const std::string where = shape.told() + ", sequence " + std::to_string(b);
        reference::Problem problem = sequence(inputs, b, backward);
        if (kept) {
            problem.kept = [&kept, b](int h, int i, int j) { return kept(b, h, i, j); };
        }
        const std::vector<float> lse = part(results.lse, shape.b, b);
        if (backward && half_lse) { problem.given_lse.assign(lse.begin(), lse.end()); }
        const reference::Answer exact = reference::exact(problem);
        const reference::Answer plain = reference::plain(problem, rounding(shape.dtype));
        const auto same = [&](const char *name, const Bits &got, const std::vector<double> &right,
                              const std::vector<double> &other) {
            expect(name, compared(numbers(part(got, shape.b, b), shape.dtype), right, other, shape.dtype),
                where);
        };
        same("out", results.out, exact.out, plain.out);
        for (size_t i = 0; i < lse.size(); ++i) {
            if (std::isinf(exact.lse[i])) {
                EXPECT_EQ(lse[i], float(exact.lse[i])) << "lse of a row that sees no key; " << where;
            } else {
                const double allowed = half_lse ? std::abs(exact.lse[i]) / 1024 + 1e-3 : 1e-3;
                ASSERT_NEAR(lse[i], exact.lse[i], allowed) << "lse of row " << i << "; " << where;
            }
        }
        if (!backward) { continue; }
        same("dq", results.dq, exact.dq, plain.dq);
        same("dk", results.dk, exact.dk, plain.dk);
        same("dv", results.dv, exact.dv, plain.dv);
        exact_bias.push_back(exact.dbias);
        plain_bias.push_back(plain.dbias);
    }
    if (backward && inputs.bias.given()) {
        expect("dbias",
            compared(results.dbias, summed(inputs.bias, exact_bias, shape),
                summed(inputs.bias, plain_bias, shape), inputs.bias.dtype),
            shape.told());
    }
}

void check(const Shape &shape, bool backward) {
    NEEDS_KERNELS(shape, backward);
    const Inputs inputs = Inputs::draw(shape);
    const Calls calls(inputs);
    SUCCEEDS(calls.run_forward()) << shape.told();
    if (backward) { SUCCEEDS(calls.run_backward()) << shape.told(); }
    expect_accurate(inputs, calls.results(backward), backward);
}

}  // namespace harness

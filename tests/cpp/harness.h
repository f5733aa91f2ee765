// What the tests share: the machine, arrays on the device, calls of one problem, and how exact is exact
// enough.

#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "flash_attention_v2.h"
#include "reference.h"

namespace harness {

// The machine.

bool emulated();  // FLASH_ATTENTION_V2_EMULATED=1: kernels are interpreted, so problems are small
int devices();    // GPUs that can be used

// Skips its tests where there is no GPU.
class OnGpu : public testing::Test {
protected:
    void SetUp() override {
        if (devices() == 0) { GTEST_SKIP() << "no GPU"; }
    }
};
// Skips its tests under emulation as well: streams, threads and graphs do not exist there.
class OnRealGpu : public OnGpu {
protected:
    void SetUp() override {
        OnGpu::SetUp();
        if (!IsSkipped() && emulated()) { GTEST_SKIP() << "needs a real GPU, this one is emulated"; }
    }
};

#define SUCCEEDS(CALL) ASSERT_EQ(CALL, cudaSuccess) << flash_attention_v2_last_error()

// Numbers.

using Bits = std::vector<uint16_t>;  // float16 or bfloat16
constexpr int32_t kHalf = FLASH_ATTENTION_V2_FLOAT16, kBfloat = FLASH_ATTENTION_V2_BFLOAT16,
                  kFloat = FLASH_ATTENTION_V2_FLOAT32, kInt = FLASH_ATTENTION_V2_INT32,
                  kBool = FLASH_ATTENTION_V2_BOOL;

using Rounding = float (*)(float);
Rounding rounding(int32_t dtype);
Bits bits(const std::vector<float> &numbers, int32_t dtype);
std::vector<float> numbers(const Bits &bits, int32_t dtype);
std::vector<float> numbers(const std::vector<float> &bits, int32_t dtype);
std::vector<float> drawn(size_t count, int32_t dtype, uint64_t seed);  // normal, rounded to the type

// Arrays on the device, between bytes that nobody may write: the destructor looks.

class Array {
public:
    explicit Array(size_t bytes);
    template<typename Element>
    explicit Array(const std::vector<Element> &content) : Array(content.size() * sizeof(Element)) {
        put(content);
    }
    ~Array();
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;

    void *data() const { return data_; }
    template<typename Element>
    Element *as() const {
        return static_cast<Element *>(data_);
    }
    size_t bytes() const { return bytes_; }
    void fill(int byte) const { EXPECT_EQ(cudaMemset(data_, byte, bytes_), cudaSuccess); }
    template<typename Element>
    void put(const std::vector<Element> &content) const {
        ASSERT_LE(content.size() * sizeof(Element), bytes_);
        ASSERT_EQ(cudaMemcpy(data_, content.data(), content.size() * sizeof(Element), cudaMemcpyHostToDevice),
            cudaSuccess);
    }
    template<typename Element>
    std::vector<Element> got() const {
        std::vector<Element> content(bytes_ / sizeof(Element));
        EXPECT_EQ(cudaMemcpy(content.data(), data_, content.size() * sizeof(Element), cudaMemcpyDeviceToHost),
            cudaSuccess);
        return content;
    }

private:
    size_t bytes_, around_;
    char *whole_ = nullptr;
    void *data_ = nullptr;
};

// The description of contiguous elements; null data where there is no memory yet.
flash_attention_v2_tensor tensor(const void *data, int32_t dtype, const std::vector<int64_t> &sizes);

// The smallest head dim that this build has both passes for, in float16; 0 where there is none.
int built_head_dim();

// Problems of sequences of one length.

struct Shape {
    int b = 1, h = 2, h_k = 2, d = built_head_dim(), len_q = 64, len_k = 64;
    int32_t dtype = kHalf;
    bool causal = false;
    int window_left = -1, window_right = -1;
    float scale = 0, softcap = 0, dropout = 0;
    int64_t split_size = 0;
    uint64_t seed = 0;
    bool alibi = false;
    bool heads_first = false;  // in memory: (b, h, length, d)
    std::string told() const;  // for messages
};

// (b or 1, h or 1, len_q or 1, len_k or 1)
struct Scores {
    std::vector<int64_t> sizes;
    std::vector<float> numbers;
    int32_t dtype = kHalf;
    bool given() const { return !sizes.empty(); }
    double at(int b, int h, int i, int j) const;
};

struct Inputs {
    Shape shape;
    std::vector<float> q, k, v, dout;  // (b, length, heads, d)
    std::vector<float> slopes;
    Scores mask, bias;
    static Inputs draw(const Shape &shape, uint64_t seed = 1);
};

// Bits of results, in the order (b, length, heads, d) whatever the layout was.
struct Results {
    Bits out, dq, dk, dv;
    std::vector<float> lse;
    std::vector<float> dbias;
    bool operator==(const Results &other) const;
};

// One problem's arrays and calls, which a test may change before it launches them.
class Calls {
public:
    explicit Calls(const Inputs &inputs);
    flash_attention_v2_forward_call forward{};
    flash_attention_v2_backward_call backward{};
    void poison() const;  // results hold NaN until they are written
    cudaError_t run_forward(cudaStream_t stream = nullptr) const;
    cudaError_t run_backward(cudaStream_t stream = nullptr) const;
    Results results(bool with_gradients = true) const;

private:
    flash_attention_v2_tensor described(const Array &array, int length, int heads) const;
    Bits ordered(const Array &array, int length, int heads) const;
    const Inputs &inputs_;
    Array q_, k_, v_, dout_, out_, lse_, dq_, dk_, dv_;
    std::unique_ptr<Array> slopes_, mask_, bias_, dbias_;
};

bool has_kernels(const Shape &shape, bool backward);
#define NEEDS_KERNELS(SHAPE, BACKWARD) \
    do { \
        if (!harness::has_kernels(SHAPE, BACKWARD)) { \
            GTEST_SKIP() << "this build has no kernels for head dim " << (SHAPE).d << " in " \
                         << ((SHAPE).dtype == harness::kHalf ? "float16" : "bfloat16"); \
        } \
    } while (0)

// What the CPU says.

reference::Problem sequence(const Inputs &inputs, int b, bool backward);

struct Allowed {
    double error, allowed;
    bool fits() const { return error <= allowed; }
};
// At most twice the error of plain operations in the type, and a unit in the last place of the largest
// number.
Allowed compared(const std::vector<float> &got, const std::vector<double> &exact,
    const std::vector<double> &plain, int32_t dtype);

// Results of all sequences against the CPU's. kept: of dropout, or none.
using Kept = std::function<double(int b, int h, int i, int j)>;
void expect_accurate(const Inputs &inputs, const Results &results, bool backward, const Kept &kept = {},
    bool half_lse = false);

// Draws, runs and compares.
void check(const Shape &shape, bool backward = true);

}  // namespace harness

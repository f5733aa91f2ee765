// Shares of a problem for several devices.

#include <algorithm>

#include "harness.h"

using namespace harness;

namespace {

TEST(Parts, CoverAllOnceAndAreAsEqualAsCanBe) {
    for (int64_t granule : {1, 3, 8}) {
        for (int64_t granules = 0; granules < 40; ++granules) {
            for (int count = 1; count < 12; ++count) {
                int64_t end_before = 0, least = INT64_MAX, most = 0;
                for (int index = 0; index < count; ++index) {
                    int64_t begin = -1, end = -1;
                    ASSERT_EQ(
                        flash_attention_v2_part(granules * granule, granule, count, index, &begin, &end),
                        cudaSuccess);
                    ASSERT_EQ(begin, end_before);
                    ASSERT_LE(begin, end);
                    ASSERT_EQ((end - begin) % granule, 0);
                    end_before = end;
                    least = std::min(least, end - begin);
                    most = std::max(most, end - begin);
                }
                ASSERT_EQ(end_before, granules * granule);
                ASSERT_LE(most - least, granule);
            }
        }
    }
}

TEST(Parts, OfWhatCannotBeDividedAreRefused) {
    int64_t begin = 0, end = 0;
    EXPECT_EQ(flash_attention_v2_part(10, 3, 2, 0, &begin, &end), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_part(-1, 1, 2, 0, &begin, &end), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_part(10, 0, 2, 0, &begin, &end), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_part(10, 1, 0, 0, &begin, &end), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_part(10, 1, 2, 2, &begin, &end), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_part(10, 1, 2, -1, &begin, &end), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_part(10, 1, 2, 0, nullptr, &end), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_forward_on_devices(nullptr, nullptr, nullptr, 1), cudaErrorInvalidValue);
    EXPECT_EQ(flash_attention_v2_forward_on_devices(nullptr, nullptr, nullptr, -1), cudaErrorInvalidValue);
}

class Devices : public OnGpu {};

// A sequence, or a group of heads, of arrays that lie contiguous: a view.
flash_attention_v2_tensor cut(
    flash_attention_v2_tensor whole, int dim, int64_t begin, int64_t end, int bytes) {
    whole.data = static_cast<char *>(whole.data) + begin * whole.strides[dim] * bytes;
    whole.sizes[dim] = end - begin;
    return whole;
}

// The same device twice: what two would do, one after the other.
void check_parts(bool heads) {
    Shape shape;
    shape.b = heads ? 1 : 3;
    shape.h = 6;
    shape.h_k = 3;
    shape.len_k = emulated() ? 200 : 600;
    shape.causal = true;
    shape.split_size = 128;
    NEEDS_KERNELS(shape, true);
    const Inputs inputs = Inputs::draw(shape);
    const Calls calls(inputs);
    SUCCEEDS(calls.run_forward());
    SUCCEEDS(calls.run_backward());
    const Results whole = calls.results();
    calls.poison();
    std::vector<flash_attention_v2_forward_call> forward(2, calls.forward);
    std::vector<flash_attention_v2_backward_call> backward(2, calls.backward);
    for (int i = 0; i < 2; ++i) {
        int64_t begin = 0, end = 0;
        const int group = heads ? shape.h / shape.h_k : 1;
        SUCCEEDS(flash_attention_v2_part(heads ? shape.h : shape.b, group, 2, i, &begin, &end));
        const int dim = heads ? 2 : 0;
        auto &f = forward[i];
        auto &b = backward[i];
        for (auto *of : {&f.q, &f.out, &b.q, &b.out, &b.dout, &b.dq}) { *of = cut(*of, dim, begin, end, 2); }
        for (auto *of : {&f.k, &f.v, &b.k, &b.v, &b.dk, &b.dv}) {
            *of = cut(*of, dim, begin / group, end / group, 2);
        }
        for (auto *of : {&f.lse, &b.lse}) { *of = cut(*of, heads ? 1 : 0, begin, end, 4); }
    }
    const int here[] = {0, 0};
    SUCCEEDS(flash_attention_v2_forward_on_devices(forward.data(), here, nullptr, 2));
    SUCCEEDS(flash_attention_v2_backward_on_devices(backward.data(), here, nullptr, 2));
    EXPECT_TRUE(calls.results() == whole);
}

TEST_F(Devices, PartsOfTheBatchHaveTheBitsOfOneCall) { check_parts(false); }
TEST_F(Devices, PartsOfTheHeadsHaveTheBitsOfOneCall) { check_parts(true); }

TEST_F(Devices, ADeviceThatIsNotThereIsAnErrorAndTheCurrentOneStays) {
    const Inputs inputs = Inputs::draw({});
    NEEDS_KERNELS(inputs.shape, false);
    const Calls calls(inputs);
    const int absent[] = {1 << 20};
    EXPECT_EQ(
        flash_attention_v2_forward_on_devices(&calls.forward, absent, nullptr, 1), cudaErrorInvalidDevice);
    int device = -1;
    SUCCEEDS(cudaGetDevice(&device));
    EXPECT_EQ(device, 0);
}

TEST_F(Devices, EachPartOnADeviceOfItsOwn) {
    if (devices() < 2) { GTEST_SKIP() << "needs two GPUs, there is " << devices(); }
    Shape shape;
    shape.split_size = 128;
    NEEDS_KERNELS(shape, false);
    const Inputs inputs = Inputs::draw(shape);
    const Calls first(inputs);
    SUCCEEDS(cudaSetDevice(1));
    {
        const Calls second(inputs);
        SUCCEEDS(cudaSetDevice(0));
        const flash_attention_v2_forward_call both[] = {first.forward, second.forward};
        const int where[] = {0, 1};
        SUCCEEDS(flash_attention_v2_forward_on_devices(both, where, nullptr, 2));
        int device = -1;
        SUCCEEDS(cudaGetDevice(&device));
        EXPECT_EQ(device, 0);
        const Results one = first.results(false);
        SUCCEEDS(cudaSetDevice(1));
        EXPECT_TRUE(second.results(false) == one);
    }
    SUCCEEDS(cudaSetDevice(0));
}

}  // namespace

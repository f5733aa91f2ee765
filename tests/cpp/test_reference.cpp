// The CPU's gradients against differences of its own forward: what all else is compared with must be right.

#include <cmath>

#include "harness.h"

namespace {

double loss(const reference::Problem &problem) {
    const reference::Answer answer = reference::exact(problem);
    double sum = 0;
    for (size_t i = 0; i < answer.out.size(); ++i) { sum += answer.out[i] * double(problem.dout[i]); }
    return sum;
}

void check_gradients(reference::Problem problem) {
    const reference::Answer answer = reference::exact(problem);
    const auto compare = [&](const char *name, std::vector<float> &input,
                             const std::vector<double> &gradient) {
        for (size_t i = 0; i < input.size(); i += 7) {
            const float kept = input[i], step = 1.f / 256;  // which floats hold exactly
            input[i] = kept + step;
            const double above = loss(problem), above_at = input[i];
            input[i] = kept - step;
            const double below = loss(problem), below_at = input[i];
            input[i] = kept;
            EXPECT_NEAR(gradient[i], (above - below) / (above_at - below_at), 1e-3)
                << name << "[" << i << "]";
        }
    };
    compare("dq", problem.q, answer.dq);
    compare("dk", problem.k, answer.dk);
    compare("dv", problem.v, answer.dv);
}

reference::Problem small() {
    reference::Problem problem;
    problem.heads = 4;
    problem.heads_k = 2;
    problem.dim = 8;
    problem.len_q = 5;
    problem.len_k = 7;
    problem.q = harness::drawn(5 * 4 * 8, harness::kHalf, 1);
    problem.k = harness::drawn(7 * 2 * 8, harness::kHalf, 2);
    problem.v = harness::drawn(7 * 2 * 8, harness::kHalf, 3);
    problem.dout = harness::drawn(5 * 4 * 8, harness::kHalf, 4);
    return problem;
}

TEST(Reference, GradientsAreThoseOfItsForward) {
    reference::Problem problem = small();
    check_gradients(problem);
    problem.causal = true;
    problem.softcap = 1.5;
    problem.window_left = 3;
    problem.slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
    problem.bias = [](int h, int i, int j) { return 0.1 * (h - i + 2 * j % 3); };
    problem.sees = [](int, int i, int j) { return (i + j) % 4 != 0; };
    check_gradients(problem);
}

TEST(Reference, DropoutIsInItsGradients) {
    reference::Problem problem = small();
    problem.kept = [](int h, int i, int j) { return (h + 2 * i + j) % 3 == 0 ? 0.0 : 1.5; };
    check_gradients(problem);
}

TEST(Reference, KnowsRowsThatSeeNothing) {
    reference::Problem problem = small();
    problem.sees = [](int, int i, int) { return i != 2; };
    const reference::Answer answer = reference::exact(problem);
    EXPECT_TRUE(std::isinf(answer.lse[2]));
    for (int i = 0; i < problem.heads * problem.dim; ++i) {
        EXPECT_EQ(answer.out[2 * problem.heads * problem.dim + i], 0.0);
    }
}

TEST(Reference, FindsAnErrorThatIsTooLargeAndPassesOneThatIsNot) {
    const std::vector<double> exact{1.0, -0.5}, plain{1.0005, -0.5};
    EXPECT_TRUE(harness::compared({1.0015f, -0.5f}, exact, plain, harness::kHalf).fits());
    EXPECT_FALSE(harness::compared({1.01f, -0.5f}, exact, plain, harness::kHalf).fits());
    EXPECT_FALSE(harness::compared({1.f, NAN}, exact, plain, harness::kHalf).fits());
}

}  // namespace

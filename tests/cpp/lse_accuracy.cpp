// --lse-accuracy: how far gradients are off where backward starts from a log-sum-exp of half precision, as
// the documented functions do, and of float32. On the CPU, in double but for the rounded log-sum-exp: the
// error is its alone.

#include <cmath>
#include <cstdio>

#include "harness.h"
#include "programs.h"

namespace programs {

namespace {

// The root of the mean square of the error, in parts of that of the gradient.
double share(const std::vector<double> &got, const std::vector<double> &right) {
    double error = 0, size = 0;
    for (size_t i = 0; i < right.size(); ++i) {
        error += (got[i] - right[i]) * (got[i] - right[i]);
        size += right[i] * right[i];
    }
    return std::sqrt(error / size);
}

}  // namespace

int lse_accuracy() {
    std::printf(
        "length  causal  lse   error of dq   of dk     of dv     (root mean square, of the gradient's)\n");
    for (const int length : {128, 512, 2048}) {
        for (const bool causal : {false, true}) {
            harness::Shape shape;
            shape.h = shape.h_k = 2;
            shape.d = 64;
            shape.len_q = shape.len_k = length;
            shape.causal = causal;
            const harness::Inputs inputs = harness::Inputs::draw(shape);
            reference::Problem problem = harness::sequence(inputs, 0, true);
            const reference::Answer right = reference::exact(problem);
            for (const bool half : {true, false}) {
                problem.given_lse = right.lse;
                for (double &number : problem.given_lse) {
                    number = half ? double(harness::rounding(harness::kHalf)(float(number)))
                                  : double(float(number));
                }
                const reference::Answer got = reference::exact(problem);
                std::printf("%6d  %-6s  %-5s %.1e       %.1e   %.1e\n", length, causal ? "yes" : "no",
                    half ? "half" : "float", share(got.dq, right.dq), share(got.dk, right.dk),
                    share(got.dv, right.dv));
            }
            problem.given_lse.clear();
            const reference::Answer plain = reference::plain(problem, harness::rounding(harness::kHalf));
            std::printf("%6d  %-6s  plain %.1e       %.1e   %.1e\n", length, causal ? "yes" : "no",
                share(plain.dq, right.dq), share(plain.dk, right.dk), share(plain.dv, right.dv));
        }
    }
    return 0;
}

}  // namespace programs

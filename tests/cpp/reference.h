// Attention by its definition, on the CPU, of one sequence: forward and backward.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace reference {

// Elements as kernels see them: rounded to the tensors' type already. All arrays are [length][heads][dim].
struct Problem {
    int heads = 1, heads_k = 1, dim = 32, len_q = 1, len_k = 1;
    std::vector<float> q, k, v, dout;  // dout may be empty: no gradients
    bool causal = false;
    int window_left = -1, window_right = -1;
    double scale = 0, softcap = 0;              // of scores; scale 0: 1 / sqrt(dim)
    std::vector<float> slopes;                  // ALiBi's, one a head; or empty
    std::function<bool(int, int, int)> sees;    // mask of head, query, key; or none
    std::function<double(int, int, int)> bias;  // likewise, added to scores; or none
    std::function<double(int, int, int)> kept;  // factor of a probability: what dropout leaves; or none
    std::vector<double> given_lse;              // backward starts from this [heads][len_q]; or empty
};

struct Answer {
    std::vector<double> out;         // [len_q][heads][dim]
    std::vector<double> lse;         // [heads][len_q]; +inf in rows that see no key
    std::vector<double> dq, dk, dv;  // as q, k and v
    std::vector<double> dbias;       // [heads][len_q][len_k]
};

// In double throughout.
Answer exact(const Problem &problem);

// As a program would do it with matrices of halves: scores in float, and what is multiplied next, such as
// probabilities, rounded by `rounded`. Results are rounded too.
Answer plain(const Problem &problem, float (*rounded)(float));

}  // namespace reference

#include "reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace reference {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template<typename Real, typename Round>
class Attention {
public:
    Attention(const Problem &problem, Round round)
        : p_(problem), round_(round), scale_(p_.scale != 0 ? p_.scale : 1 / std::sqrt(double(p_.dim))) {}

    Answer run() {
        const size_t rows = size_t(p_.len_q) * p_.heads * p_.dim,
                     keys = size_t(p_.len_k) * p_.heads_k * p_.dim;
        const bool backward = !p_.dout.empty();
        answer_.out.assign(rows, 0);
        answer_.lse.assign(size_t(p_.heads) * p_.len_q, kInfinity);
        if (backward) {
            answer_.dq.assign(rows, 0);
            answer_.dk.assign(keys, 0);
            answer_.dv.assign(keys, 0);
            answer_.dbias.assign(size_t(p_.heads) * p_.len_q * p_.len_k, 0);
        }
        for (int head = 0; head < p_.heads; ++head) {
            for (int row = 0; row < p_.len_q; ++row) { run_row(head, row, backward); }
        }
        for (auto *result : {&answer_.out, &answer_.dq, &answer_.dk, &answer_.dv}) {
            for (double &number : *result) { number = double(round_(Real(number))); }
        }
        return answer_;
    }

private:
    const float *at(const std::vector<float> &array, int heads, int row, int head) const {
        return array.data() + (size_t(row) * heads + head) * p_.dim;
    }
    double *at(std::vector<double> &array, int heads, int row, int head) const {
        return array.data() + (size_t(row) * heads + head) * p_.dim;
    }
    Real product(const float *a, const float *b) const {
        Real sum = 0;
        for (int i = 0; i < p_.dim; ++i) { sum += Real(a[i]) * Real(b[i]); }
        return sum;
    }

    bool visible(int head, int row, int key) const {
        const int diagonal = row + p_.len_k - p_.len_q;
        if (p_.causal && key > diagonal) { return false; }
        if (p_.window_left >= 0 && key < diagonal - p_.window_left) { return false; }
        if (p_.window_right >= 0 && key > diagonal + p_.window_right) { return false; }
        return !p_.sees || p_.sees(head, row, key);
    }

    // The slope times the distance; in causal calls without a window the kernels add the slope times the
    // column, which changes a row's lse but no probability.
    double alibi(int head, int row, int key) const {
        if (p_.slopes.empty()) { return 0; }
        const bool by_column = p_.causal && p_.window_left < 0;
        const int diagonal = row + p_.len_k - p_.len_q;
        return double(p_.slopes[head]) * (by_column ? key : -std::abs(diagonal - key));
    }

    void run_row(int head, int row, bool backward) {
        const int head_k = head / (p_.heads / p_.heads_k);
        const float *const q = at(p_.q, p_.heads, row, head);
        std::vector<Real> scores(p_.len_k), capped(p_.len_k), probabilities(p_.len_k);
        std::vector<bool> seen(p_.len_k);
        Real most = -std::numeric_limits<Real>::infinity();
        for (int key = 0; key < p_.len_k; ++key) {
            seen[key] = visible(head, row, key);
            if (!seen[key]) { continue; }
            Real score = product(q, at(p_.k, p_.heads_k, key, head_k)) * Real(scale_);
            if (p_.softcap > 0) {
                capped[key] = std::tanh(score / Real(p_.softcap));
                score = Real(p_.softcap) * capped[key];
            }
            if (p_.bias) { score += Real(p_.bias(head, row, key)); }
            scores[key] = score + Real(alibi(head, row, key));
            most = std::max(most, scores[key]);
        }
        double &lse = answer_.lse[size_t(head) * p_.len_q + row];
        if (!std::isfinite(most)) { return; }  // it sees no key: zeros
        Real sum = 0;
        for (int key = 0; key < p_.len_k; ++key) {
            if (!seen[key]) { continue; }
            probabilities[key] = std::exp(scores[key] - most);
            sum += probabilities[key];
        }
        lse = double(most) + std::log(double(sum));
        std::vector<Real> out(p_.dim);
        for (int key = 0; key < p_.len_k; ++key) {
            probabilities[key] /= sum;
            const Real weight = round_(dropped(head, row, key, probabilities[key]));
            const float *const v = at(p_.v, p_.heads_k, key, head_k);
            for (int i = 0; i < p_.dim; ++i) { out[i] += weight * Real(v[i]); }
        }
        std::copy(out.begin(), out.end(), at(answer_.out, p_.heads, row, head));
        if (!backward) { return; }
        if (!p_.given_lse.empty()) {
            const Real given = Real(p_.given_lse[size_t(head) * p_.len_q + row]);
            for (int key = 0; key < p_.len_k; ++key) {
                probabilities[key] = seen[key] ? std::exp(scores[key] - given) : Real(0);
            }
        }
        const float *const dout = at(p_.dout, p_.heads, row, head);
        Real mean = 0;  // of the gradients of a row's probabilities
        for (int i = 0; i < p_.dim; ++i) { mean += Real(dout[i]) * out[i]; }
        double *const dq = at(answer_.dq, p_.heads, row, head);
        for (int key = 0; key < p_.len_k; ++key) {
            if (!seen[key]) { continue; }
            const Real weight = round_(dropped(head, row, key, probabilities[key]));
            const Real by_probability =
                dropped(head, row, key, round_(product(dout, at(p_.v, p_.heads_k, key, head_k))));
            Real by_score = probabilities[key] * (by_probability - mean);
            answer_.dbias[(size_t(head) * p_.len_q + row) * p_.len_k + key] = double(by_score);
            if (p_.softcap > 0) { by_score *= 1 - capped[key] * capped[key]; }
            by_score = round_(by_score);
            double *const dk = at(answer_.dk, p_.heads_k, key, head_k);
            double *const dv = at(answer_.dv, p_.heads_k, key, head_k);
            const float *const k = at(p_.k, p_.heads_k, key, head_k);
            for (int i = 0; i < p_.dim; ++i) {
                dq[i] += double(by_score * Real(scale_) * Real(k[i]));
                dk[i] += double(by_score * Real(scale_) * Real(q[i]));
                dv[i] += double(weight * Real(dout[i]));
            }
        }
    }

    Real dropped(int head, int row, int key, Real number) const {
        return p_.kept ? number * Real(p_.kept(head, row, key)) : number;
    }

    const Problem &p_;
    Round round_;
    const double scale_;
    Answer answer_;
};

}  // namespace

Answer exact(const Problem &problem) {
    const auto same = [](double number) { return number; };
    return Attention<double, decltype(same)>(problem, same).run();
}

Answer plain(const Problem &problem, float (*rounded)(float)) {
    return Attention<float, float (*)(float)>(problem, rounded).run();
}

}  // namespace reference

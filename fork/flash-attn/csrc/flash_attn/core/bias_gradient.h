// The gradient of attn_bias of a call, on the host.

#pragma once

#include <algorithm>

#include "namespace_config.h"
#include "call.h"
#include "flash.h"
#include "scores.h"
#include "small_kernels.h"

namespace FLASH_NAMESPACE {
namespace core {

// The gradient of the bias of a call, and the parts that it is the sum of. Sets
// params.fork_bwd.bias_gradient.
class BiasGradient {
public:
    BiasGradient(Flash_bwd_params &params, const Gradients &call, const ScoreSizes &sizes)
        : sum_(call.bias_gradient) {
        params.fork_bwd.bias_gradient = {};
        if (!sum_.given() || !call.attn_bias.given()) { return; }
        const Tensor &bias = call.attn_bias;
        const auto size = [&](int from_end) { return size_from_end(bias, from_end); };
        // A bias that all keys of a query share changes no probability.
        if (bias.elements() == 0 || (size(1) == 1 && params.seqlen_k != 1)) {
            zeros_ = true;
            return;
        }
        fork_bias::Gradient &gradient = params.fork_bwd.bias_gradient;
        const bool rows_follow = sizes.packed && bias.dims < 4;
        gradient.rows_share =
            size(2) == 1 && (rows_follow ? sizes.queries > 1 : sizes.packed || params.seqlen_q > 1);
        gradient.batch_shares = rows_follow ? gradient.rows_share : size(4) == 1;
        gradient.rows_follow = rows_follow && !gradient.rows_share;
        gradient.heads_per_slice = params.h / size(3);
        const auto blocks = [](int64_t length, int block) { return (length + block - 1) / block; };
        // Where a sequence has a bias of its own, nothing but its own heads says how many parts there are.
        gradient.head_parts = gradient.rows_share ? gradient.heads_per_slice : 1;
        const int64_t tiles = size(3) * gradient.head_parts * blocks(params.seqlen_k, kTileKeys)
            * (gradient.rows_share ? 1 : blocks(params.seqlen_q, kTileRows));
        gradient.parts = gradient.head_parts
            * (gradient.batch_shares ? std::min(int64_t(params.b), blocks(kFewTiles, tiles)) : 1);
        // Rows of no sequence have a gradient of zeros.
        zeros_ = gradient.rows_follow;
        parts_ = gradient.parts;
        gradient.is_float = parts_ > 1 || sum_.dtype == Dtype::fp32;
        gradient.part_stride = bias.elements();
        gradient.row_stride = gradient.rows_share ? 0 : size(1);
        gradient.head_stride = size(1) * size(2);
        gradient.batch_stride = gradient.batch_shares || rows_follow ? 0 : size(1) * size(2) * size(3);
    }

    void reserve(Scratch &scratch) {
        if (parts_ > 1) { at_ = scratch.reserve(parts_ * sum_.elements() * sizeof(float)); }
    }

    // Before the launch.
    void begin(Flash_bwd_params &params, const Scratch &scratch, cudaStream_t stream) {
        if (zeros_) { fill(sum_, 0.f, stream); }
        if (parts_ > 1) {
            params.fork_bwd.bias_gradient.ptr = sum_of_parts_ = scratch.at<float>(at_);
        } else if (parts_ == 1) {
            params.fork_bwd.bias_gradient.ptr = sum_.data;
        }
    }

    // After it.
    void finish(cudaStream_t stream) {
        if (parts_ > 1) { sum_parts(sum_, sum_of_parts_, parts_, stream); }
    }

private:
    // Rough numbers: of a tile, and of tiles that fill a GPU. Not its own, for then bits would depend on it.
    static constexpr int kTileRows = 64, kTileKeys = 128, kFewTiles = 256;

    Tensor sum_;
    bool zeros_ = false;
    int parts_ = 0;
    size_t at_ = 0;
    float *sum_of_parts_ = nullptr;
};

}  // namespace core
}  // namespace FLASH_NAMESPACE

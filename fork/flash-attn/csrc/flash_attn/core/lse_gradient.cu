#include "fork_lse_gradient.h"

#include <algorithm>

#include "fork_runtime.h"

namespace FLASH_NAMESPACE {
namespace fork_lse {

namespace {

constexpr int kThreads = 128;

// Rows of no sequence have no sums.
__global__ void take_from_sums_kernel(const Flash_bwd_params params) {
    const int bidb = blockIdx.y, bidh = blockIdx.z;
    const int row = blockIdx.x * kThreads + threadIdx.x;
    int begin = 0, rows = params.seqlen_q;
    int64_t sums_at = (int64_t(bidb) * params.h + bidh) * params.seqlen_q_rounded,
            lse_at = (int64_t(bidb) * params.h + bidh) * params.seqlen_q;
    if (params.unpadded_lse) {
        begin = params.cu_seqlens_q[bidb];
        const int end = min(params.cu_seqlens_q[bidb + 1], params.total_q);  // whatever cu_seqlens_q holds
        rows = min(rows, end - begin);
        sums_at = bidh * (params.total_q + int64_t(128) * params.b) + begin + int64_t(128) * bidb;
        lse_at = int64_t(bidh) * params.total_q + begin;
    }
    if (row >= rows || begin < 0) { return; }
    // Where there is dropout, sums are scaled by the probability to keep.
    float *const sum = static_cast<float *>(params.dsoftmax_sum) + sums_at + row;
    *sum = __fmaf_rn(-params.p_dropout, params.fork_bwd.lse_gradient[lse_at + row], *sum);
}

}  // namespace

void take_from_sums(const Flash_bwd_params &params, cudaStream_t stream) {
    if (params.fork_bwd.lse_gradient == nullptr) { return; }
    const dim3 grid((params.seqlen_q + kThreads - 1) / kThreads, params.b, params.h);
    take_from_sums_kernel<<<grid, kThreads, 0, stream>>>(params);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace fork_lse
}  // namespace FLASH_NAMESPACE

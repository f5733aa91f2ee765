// The gradient of a loss on softmax_lse.
//
// A score's gradient is p * (dp - d), where d is the row's sum of dout * out. The log-sum-exp of a row has
// the gradient p for each score, so it adds p * dlse: d - dlse in place of d. Sums lie in memory between the
// kernel that makes them and those that read them; there a small kernel takes dlse from them. No other kernel
// knows of it, and calls without such a loss have none.

#pragma once

#include "namespace_config.h"
#include "flash.h"

namespace FLASH_NAMESPACE {
namespace fork_lse {

// Behind the kernel of the rows' sums. The core defines it.
void take_from_sums(const Flash_bwd_params &params, cudaStream_t stream);

}  // namespace fork_lse
}  // namespace FLASH_NAMESPACE

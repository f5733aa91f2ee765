// Kernels of a call: how its keys are split, and which kernel runs.

#pragma once

#include "namespace_config.h"
#include "flash.h"
#include "host.h"

namespace FLASH_NAMESPACE {
namespace core {

// Decides where keys are split, and reserves what the partial results take; then allocates them. Call when
// all else that says what a row sees is in params.
void set_splits(
    Flash_fwd_params &params, Scratch &scratch, const Host &host, float p_dropout, int num_splits);

void run_forward(Flash_fwd_params &params, cudaStream_t stream, bool only_split_kernel);
void run_backward(Flash_bwd_params &params, cudaStream_t stream);

// Memory of the current GPU that kernels write to and nobody reads, for results that the caller does not
// want.
void *unread_memory(size_t bytes, const Host &host);

// Ampere and newer alone have the instructions.
void check_gpu();

}  // namespace core
}  // namespace FLASH_NAMESPACE

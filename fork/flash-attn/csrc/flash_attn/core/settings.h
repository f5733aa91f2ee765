// What a process sets for all its calls, and what this build has. Bindings are libraries beside the core's,
// so they ask here (by bound.h): of what headers keep in a static variable they would have a copy of their
// own.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "namespace_config.h"

namespace FLASH_NAMESPACE {
namespace core {

// Raises the error of an environment variable that has no meaning.
void check_environment();

// Tokens of a chunk where nobody says otherwise.
int64_t default_split_size();

// Raises an error, which begins with source, for tokens that no kernel can take.
void check_split_size(int64_t split_size, const std::string &source);

void set_process_mode(bool enabled, int64_t split_size);

// 2^32 where the mode is on, and the tokens: one word, so that nobody sees half of a change.
int64_t process_mode();

// Names of the kernels here, such as "split_hdim64_fp16_causal"; and whether any serves a head dim and dtype.
std::vector<std::string> kernel_names();
bool has_kernels(int head_dim, bool is_bf16, bool backward);
bool has_scores();  // attn_mask and attn_bias

// For tests; both return what was set before.
int64_t exchange_test_paths(int64_t paths);
int64_t exchange_test_scratch(int64_t bytes);

}  // namespace core
}  // namespace FLASH_NAMESPACE

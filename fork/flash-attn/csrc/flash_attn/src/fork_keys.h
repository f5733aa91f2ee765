// How many keys the kernels take at once.

#pragma once

#include "namespace_config.h"

namespace FLASH_NAMESPACE {
namespace fork_keys {

// Of a split kernel's tile, its kBlockN: upstream's, but at most so many. Upstream's have 256 up to head dim
// 64.
constexpr int kMostOfTile = 128;
constexpr int tile(int head_dim) { return head_dim <= 128 ? kMostOfTile : 64; }

// Of a step of the softmax in deterministic mode: kBlockN of upstream's standard kernels (on compute
// capability 8.6 and 8.9, not of all of head dim 128's).
constexpr int step(int head_dim) { return head_dim <= 64 ? 128 : 64; }

}  // namespace fork_keys
}  // namespace FLASH_NAMESPACE

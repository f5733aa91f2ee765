#pragma once

#include "namespace_config.h"

namespace FLASH_NAMESPACE {
namespace fork_window {

// A side of a window with no bound. Sums with sequence lengths stay below 2^31.
constexpr int kUnbounded = 1 << 30;

}  // namespace fork_window
}  // namespace FLASH_NAMESPACE

// learnable_sink: a score without a key that joins each row's softmax, one for each head.

#pragma once

#include <cstdint>

#include "namespace_config.h"

namespace FLASH_NAMESPACE {
namespace fork_sink {

enum class Type : uint8_t { fp32, fp16, bf16 };

struct Sink {
    const void *ptr;  // a number for each head of queries; null: no sink
    Type type;
    bool rows_are_heads;  // the rows of a head are the heads of a group
};

}  // namespace fork_sink
}  // namespace FLASH_NAMESPACE

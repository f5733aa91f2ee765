// Errors of the core: an exception that says which kind of mistake it is about. A binding turns it into its
// language's own.

#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "namespace_config.h"

namespace FLASH_NAMESPACE {
namespace core {

enum class Kind {
    runtime,          // the state of the GPU, or a combination of arguments that no kernel takes
    value,            // an argument's value or shape
    type,             // an argument's dtype
    not_implemented,  // what this build, or no build, has
    memory,           // no memory for scratch
};

struct Error : std::runtime_error {
    Kind kind;
    Error(Kind of, const std::string &text) : std::runtime_error(text), kind(of) {}
};

// Words of a text; other types bring an append of their own. (No std::ostringstream: its symbols are newer
// than the oldest libstdc++ that a wheel may meet.)
inline void append(std::string &text, const char *word) { text += word; }
inline void append(std::string &text, const std::string &words) { text += words; }
template<typename Number, std::enable_if_t<std::is_integral_v<Number>, int> = 0>
void append(std::string &text, Number number) {
    text += std::to_string(number);
}
inline void append(std::string &text, double number) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", number);
    text += digits;
}

template<typename... Parts>
std::string text_of(const Parts &...parts) {
    std::string text;
    (append(text, parts), ...);
    return text;
}

}  // namespace core
}  // namespace FLASH_NAMESPACE

// The text is made only where the condition fails.
#define FORK_CHECK_AS(KIND, CONDITION, ...) \
    do { \
        if (!(CONDITION)) { \
            throw ::FLASH_NAMESPACE::core::Error( \
                ::FLASH_NAMESPACE::core::Kind::KIND, ::FLASH_NAMESPACE::core::text_of(__VA_ARGS__)); \
        } \
    } while (0)
#define FORK_CHECK(CONDITION, ...) FORK_CHECK_AS(runtime, CONDITION, __VA_ARGS__)
#define FORK_CHECK_VALUE(CONDITION, ...) FORK_CHECK_AS(value, CONDITION, __VA_ARGS__)
#define FORK_CHECK_TYPE(CONDITION, ...) FORK_CHECK_AS(type, CONDITION, __VA_ARGS__)
#define FORK_CHECK_NOT_IMPLEMENTED(CONDITION, ...) FORK_CHECK_AS(not_implemented, CONDITION, __VA_ARGS__)

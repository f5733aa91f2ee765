// The deterministic mode: where it is kept and how a call reads it.
//
// Two layers. The process-wide mode starts from FA2_DETERMINISTIC and FA2_SPLIT_SIZE and is one atomic
// word, so that threads never see half of a change. Over it lies what a call brings: a binding's scope. A
// call reads the mode once, on the host, when it launches: a compiled graph obeys the mode of the moment it
// runs in, a captured CUDA graph replays the launches it recorded.

#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "namespace_config.h"
#include "core/error.h"

namespace FLASH_NAMESPACE {
namespace fork_mode {

constexpr int kDefaultSplitSize = 2048;
// Every split kernel's kBlockN (128 or 64, by head dim) is a multiple of this.
constexpr int kSplitSizeGranule = 64;
// Leaves room for sums with sequence lengths in an int.
constexpr int64_t kMaxSplitSize = int64_t(1) << 30;

struct Mode {
    bool enabled;
    int split_size;  // tokens
};

// An unset variable and an empty one are the same.
inline std::optional<std::string> read_env(const char *name) {
    const char *text = std::getenv(name);
    if (text == nullptr || *text == '\0') { return std::nullopt; }
    return std::string(text);
}

inline bool env_switch(const char *name) {
    const std::string text = read_env(name).value_or("0");
    FORK_CHECK_VALUE(text == "0" || text == "1", name, "='", text, "' is neither 0 nor 1");
    return text == "1";
}

inline void check_split_size(int64_t split_size, const std::string &source) {
    FORK_CHECK_VALUE(split_size > 0 && split_size % kSplitSizeGranule == 0 && split_size <= kMaxSplitSize,
        source, " is not a positive multiple of ", kSplitSizeGranule, " tokens up to ", kMaxSplitSize,
        "; multiples of 128, such as 2048, suit every head_dim");
}

// Without a sign; -1: it is none. Ten digits hold every int; longer ones would overflow.
inline int64_t parse_number(const std::string &text) {
    if (text.size() > 10 || text.find_first_not_of("0123456789") != std::string::npos) { return -1; }
    int64_t number = 0;
    for (const char digit : text) { number = number * 10 + (digit - '0'); }
    return number;
}

inline int parse_env_split_size() {
    const auto text = read_env("FA2_SPLIT_SIZE");
    if (!text) { return kDefaultSplitSize; }
    const int64_t tokens = parse_number(*text);
    check_split_size(tokens, "FA2_SPLIT_SIZE='" + *text + "'");
    return int(tokens);
}

// The environment is read once; a bad value stays an error at every call.
inline int env_split_size() {
    static const int split_size = parse_env_split_size();
    return split_size;
}

// Lines for FA2_DEBUG=1 are written whole, so that those of two threads do not mix.
inline bool debug() {
    static const bool on = env_switch("FA2_DEBUG");
    return on;
}

// FA2_CHECK=1: each call waits for the GPU to look at its tables of lengths, indices and pages.
inline bool checks_values() {
    static const bool on = env_switch("FA2_CHECK");
    return on;
}

// FA2_WAIT_LIMIT: the seconds after which a thread block that waits for another's turn gives up; 0: never. No
// turn takes so long, also where kernels run a thousand times slower or share the GPU.
constexpr int64_t kWaitLimit = 120, kMostWaitLimit = 86400;
inline int parse_env_wait_limit() {
    const std::string text = read_env("FA2_WAIT_LIMIT").value_or(std::to_string(kWaitLimit));
    const int64_t seconds = parse_number(text);
    FORK_CHECK_VALUE(seconds >= 0 && seconds <= kMostWaitLimit, "FA2_WAIT_LIMIT='", text,
        "' is no number of seconds from 0 (no limit) to ", kMostWaitLimit);
    return int((seconds * 1000000000 + (int64_t(1) << 32) - 1) >> 32);  // fork_turn.h's units
}
inline int wait_limit() {
    static const int limit = parse_env_wait_limit();
    return limit;
}

inline void log_splitkv(
    int batch_size, int seqlen_k, int seqlen_q, int n_blocks, int num_splits, int fixed_tokens) {
    if (!debug()) { return; }
    std::fprintf(stderr,
        "[flash-attn] set_params_splitkv: B=%d S_k=%d S_q=%d n_blocks=%d num_splits=%d fixed_tokens=%d\n",
        batch_size, seqlen_k, seqlen_q, n_blocks, num_splits, fixed_tokens);
}

inline int64_t pack(Mode mode) { return (int64_t(mode.enabled) << 32) | int64_t(mode.split_size); }
inline Mode unpack(int64_t word) { return {(word >> 32) != 0, int(word & 0x7fffffff)}; }

inline std::atomic<int64_t> &process_word() {
    static std::atomic<int64_t> word{pack({env_switch("FA2_DETERMINISTIC"), env_split_size()})};
    return word;
}

inline void set_process(Mode mode) { process_word().store(pack(mode)); }

// The mode of a call: what it brings (the tokens of a chunk; 0: off), or the process-wide one.
constexpr int64_t kProcessWide = -1;
inline Mode of_call(int64_t split_size) {
    if (split_size == kProcessWide) { return unpack(process_word().load()); }
    return {split_size != 0, int(split_size)};
}

// For tests and benchmarks only: paths that the deterministic mode must take, to the same bits as any other:
// without Is_even_MN, where chunks are folded, in turns, with tiles for each head of queries, and with tiles
// of 64 rows in the split kernels, which calls with the mode off may have too.
constexpr int kUneven = 1, kOneBlock = 2, kApart = 4, kStandard = 8, kInTurns = 16, kOwnTiles = 32,
              kWide = 64;
inline std::atomic<int> &test_paths() {
    static std::atomic<int> paths{0};
    return paths;
}

// For tests: the bytes of scratch for which a call is cut into slices; 0: as ever.
inline std::atomic<int64_t> &test_scratch() {
    static std::atomic<int64_t> bytes{0};
    return bytes;
}

}  // namespace fork_mode
}  // namespace FLASH_NAMESPACE

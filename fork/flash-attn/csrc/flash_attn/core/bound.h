// The core's calls and settings for libraries beside the core's: by a table, so that one symbol is shown and
// all others stay within. Such a library includes this.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "namespace_config.h"
#include "call.h"
#include "settings.h"

namespace FLASH_NAMESPACE {
namespace core {

template<typename Call>
struct Functions {
    void (*check)(const Call &);
    void (*run)(const Call &, const Host &);
};

struct Table {
    Functions<Forward> forward;
    Functions<VarlenForward> varlen_forward;
    Functions<CacheForward> cache_forward;
    Functions<Backward> backward;
    Functions<VarlenBackward> varlen_backward;
    int (*enter_framework)();
    void (*leave_framework)(int);
    void (*check_environment)();
    int64_t (*default_split_size)();
    void (*check_split_size)(int64_t, const std::string &);
    void (*set_process_mode)(bool, int64_t);
    int64_t (*process_mode)();
    std::vector<std::string> (*kernel_names)();
    bool (*has_scores)();
    int64_t (*exchange_test_paths)(int64_t);
    int64_t (*exchange_test_scratch)(int64_t);
};

extern "C" __attribute__((visibility("default"))) const Table *flash_attn_core();

#ifndef FORK_CORE  // where they are defined
inline const Table &table() {
    static const Table &of_the_library = *flash_attn_core();
    return of_the_library;
}

inline void check(const Forward &call) { table().forward.check(call); }
inline void check(const VarlenForward &call) { table().varlen_forward.check(call); }
inline void check(const CacheForward &call) { table().cache_forward.check(call); }
inline void check(const Backward &call) { table().backward.check(call); }
inline void check(const VarlenBackward &call) { table().varlen_backward.check(call); }
inline void run(const Forward &given, const Host &host) { table().forward.run(given, host); }
inline void run(const VarlenForward &given, const Host &host) { table().varlen_forward.run(given, host); }
inline void run(const CacheForward &given, const Host &host) { table().cache_forward.run(given, host); }
inline void run(const Backward &given, const Host &host) { table().backward.run(given, host); }
inline void run(const VarlenBackward &given, const Host &host) { table().varlen_backward.run(given, host); }
inline int enter_framework() { return table().enter_framework(); }
inline void leave_framework(int before) { table().leave_framework(before); }
inline void check_environment() { table().check_environment(); }
inline int64_t default_split_size() { return table().default_split_size(); }
inline void check_split_size(int64_t split_size, const std::string &source) {
    table().check_split_size(split_size, source);
}
inline void set_process_mode(bool enabled, int64_t split_size) {
    table().set_process_mode(enabled, split_size);
}
inline int64_t process_mode() { return table().process_mode(); }
inline std::vector<std::string> kernel_names() { return table().kernel_names(); }
inline bool has_scores() { return table().has_scores(); }
inline int64_t exchange_test_paths(int64_t paths) { return table().exchange_test_paths(paths); }
inline int64_t exchange_test_scratch(int64_t bytes) { return table().exchange_test_scratch(bytes); }
#endif

}  // namespace core
}  // namespace FLASH_NAMESPACE

#include "settings.h"

#define FORK_CORE
#include "bound.h"

#include "flash.h"
#include "fork_kernel_set.h"
#include "fork_mode.h"

namespace FLASH_NAMESPACE {
namespace core {

void check_environment() {
    fork_mode::process_word();
    fork_mode::debug();
    fork_mode::checks_values();
    fork_mode::wait_limit();
}

int64_t default_split_size() { return fork_mode::env_split_size(); }

void check_split_size(int64_t split_size, const std::string &source) {
    fork_mode::check_split_size(split_size, source);
}

void set_process_mode(bool enabled, int64_t split_size) {
    fork_mode::set_process({enabled, int(split_size)});
}

int64_t process_mode() { return fork_mode::pack(fork_mode::of_call(fork_mode::kProcessWide)); }

std::vector<std::string> kernel_names() { return fork_kernels::list(); }

bool has_kernels(int head_dim, bool is_bf16, bool backward) {
    using fork_kernels::Pass;
    const int kernels = fork_kernels::head_dim_of(head_dim);
    for (const bool causal : {false, true}) {
        if (backward ? fork_kernels::has(Pass::bwd, kernels, is_bf16, causal)
                     : fork_kernels::has(Pass::fwd, kernels, is_bf16, causal)
                    || fork_kernels::has(Pass::split, kernels, is_bf16, causal)) {
            return true;
        }
    }
    return false;
}

bool has_scores() { return fork_bias::kBuilt; }

int64_t exchange_test_paths(int64_t paths) { return fork_mode::test_paths().exchange(int(paths)); }
int64_t exchange_test_scratch(int64_t bytes) { return fork_mode::test_scratch().exchange(bytes); }

extern "C" const Table *flash_attn_core() {
    static constexpr Table kTable{{check, run}, {check, run}, {check, run}, {check, run}, {check, run},
        enter_framework, leave_framework, check_environment, default_split_size, check_split_size,
        set_process_mode, process_mode, kernel_names, has_scores, exchange_test_paths, exchange_test_scratch};
    return &kTable;
}

}  // namespace core
}  // namespace FLASH_NAMESPACE

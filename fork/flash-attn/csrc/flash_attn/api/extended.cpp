// The functions of flash_attention_v2_c.h.

#include <memory>
#include <string>

#include "api/answer.h"
#include "api/calls.h"
#include "api/flash_attention_v2_c.h"
#include "host.h"
#include "settings.h"

namespace FLASH_NAMESPACE {
namespace api {
namespace {

template<typename Call>
cudaError_t fill_in(Call *call, size_t size) noexcept {
    return answered([&] {
        FORK_ACCEPT(call != nullptr, "call is null");
        FORK_ACCEPT(size == sizeof(Call), "size=", size, " is no version of the call that this library (",
            FLASH_ATTENTION_V2_VERSION, ") knows, which has ", sizeof(Call), " bytes");
        *call = defaults<Call>();
    });
}

// Without a GPU, a mistake in the call is told before that there is none.
template<typename Call>
void check_without_gpu(const Call &call) {
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess) { return; }
    Memory memory = Memory::checking(call.workspace, call.workspace_size);
    run(call, memory);
}

template<typename Call>
void launch(const Call &call, cudaStream_t stream) {
    check_without_gpu(call);
    const Ready ready;
    Memory memory = call.workspace != nullptr
        ? Memory::of_workspace(ready.device(), call.workspace, call.workspace_size, stream)
        : Memory::of_stream(ready.device(), stream);
    run(call, memory);
}

template<typename Call>
cudaError_t measure(const Call *call, size_t *bytes) noexcept {
    return answered([&] {
        const Call &given = known(call);
        FORK_ACCEPT(bytes != nullptr, "bytes is null");
        check_without_gpu(given);
        const Ready ready;
        Memory memory = Memory::measuring(ready.device());
        run(given, memory);
        *bytes = memory.bytes();
    });
}

template<typename Call>
cudaError_t launch_on(
    const Call *calls, const int *devices, const cudaStream_t *streams, int count) noexcept {
    return answered([&] {
        FORK_ACCEPT(count >= 0, "count=", count, " is negative");
        FORK_ACCEPT(count == 0 || (calls != nullptr && devices != nullptr), "calls or devices is null");
        // As far apart as they are in the program, whose structs may be of another version.
        const auto at = [&](int i) -> const Call & {
            return known(
                reinterpret_cast<const Call *>(reinterpret_cast<const char *>(calls) + i * calls->size));
        };
        for (int i = 0; i < count; ++i) { check_without_gpu(at(i)); }
        for (int i = 0; i < count; ++i) {
            const core::OnGpu guard(devices[i]);
            launch(at(i), streams == nullptr ? nullptr : streams[i]);
        }
    });
}

}  // namespace
}  // namespace api
}  // namespace FLASH_NAMESPACE

using namespace FLASH_NAMESPACE;

extern "C" {

cudaError_t flash_attention_v2_init(void) {
    return api::answered([] {
        core::check_environment();
        const api::Ready ready;
    });
}

cudaError_t flash_attention_v2_cleanup(void) {
    return api::answered([] { api::release_memory(); });
}

cudaError_t flash_attention_v2_forward_defaults(flash_attention_v2_forward_call *call, size_t size) {
    return api::fill_in(call, size);
}
cudaError_t flash_attention_v2_backward_defaults(flash_attention_v2_backward_call *call, size_t size) {
    return api::fill_in(call, size);
}

cudaError_t flash_attention_v2_run_forward(const flash_attention_v2_forward_call *call, cudaStream_t stream) {
    return api::answered([&] { api::launch(api::known(call), stream); });
}
cudaError_t flash_attention_v2_run_backward(
    const flash_attention_v2_backward_call *call, cudaStream_t stream) {
    return api::answered([&] { api::launch(api::known(call), stream); });
}

cudaError_t flash_attention_v2_forward_workspace(const flash_attention_v2_forward_call *call, size_t *bytes) {
    return api::measure(call, bytes);
}
cudaError_t flash_attention_v2_backward_workspace(
    const flash_attention_v2_backward_call *call, size_t *bytes) {
    return api::measure(call, bytes);
}

cudaError_t flash_attention_v2_part(
    int64_t length, int64_t granule, int count, int index, int64_t *begin, int64_t *end) {
    return api::answered([&] {
        FORK_ACCEPT(begin != nullptr && end != nullptr, "begin or end is null");
        FORK_ACCEPT(length >= 0 && granule > 0 && length % granule == 0, "length=", length,
            " is no multiple of granule=", granule);
        FORK_ACCEPT(
            count > 0 && index >= 0 && index < count, "index=", index, " is none of count=", count, " parts");
        const int64_t granules = length / granule, each = granules / count, more = granules % count;
        const int64_t first = index * each + (index < more ? index : more);
        *begin = first * granule;
        *end = (first + each + (index < more)) * granule;
    });
}
cudaError_t flash_attention_v2_forward_on_devices(const flash_attention_v2_forward_call *calls,
    const int *devices, const cudaStream_t *streams, int count) {
    return api::launch_on(calls, devices, streams, count);
}
cudaError_t flash_attention_v2_backward_on_devices(const flash_attention_v2_backward_call *calls,
    const int *devices, const cudaStream_t *streams, int count) {
    return api::launch_on(calls, devices, streams, count);
}

cudaError_t flash_attention_v2_set_deterministic(int enabled, int64_t split_size) {
    return api::answered([&] {
        FORK_ACCEPT(enabled == 0 || enabled == 1, "enabled=", enabled, " is neither 0 nor 1");
        const int64_t tokens = split_size == 0 ? core::default_split_size() : split_size;
        core::check_split_size(tokens, core::text_of("split_size=", split_size));
        core::set_process_mode(enabled == 1, tokens);
    });
}
cudaError_t flash_attention_v2_get_deterministic(int *enabled, int64_t *split_size) {
    return api::answered([&] {
        FORK_ACCEPT(enabled != nullptr && split_size != nullptr, "enabled or split_size is null");
        const int64_t mode = core::process_mode();
        *enabled = int(mode >> 32 != 0);
        *split_size = mode & 0x7fffffff;
    });
}

int flash_attention_v2_has_kernels(int head_dim, int dtype, int pass) {
    api::forget_error();
    const bool is_half = dtype == FLASH_ATTENTION_V2_FLOAT16, is_bf16 = dtype == FLASH_ATTENTION_V2_BFLOAT16;
    const bool fits = head_dim > 0 && head_dim <= 256 && head_dim % 8 == 0 && (pass == 0 || pass == 1);
    return fits && (is_half || is_bf16) && core::has_kernels(head_dim, is_bf16, pass == 1);
}

const char *flash_attention_v2_kernels(void) {
    const char *text = "";
    api::answered([&] {
        static const std::string *const lines = [] {
            auto words = std::make_unique<std::string>();
            for (const std::string &name : core::kernel_names()) {
                *words += (words->empty() ? "" : "\n") + name;
            }
            return words.release();  // for as long as the process lives
        }();
        text = lines->c_str();
    });
    return text;
}

const char *flash_attention_v2_version(void) { return FLASH_ATTENTION_V2_VERSION; }

const char *flash_attention_v2_last_error(void) { return api::last_error(); }
}

// Torch's tensors in memory that kernels may touch, filled with NaN where torch fills nothing; and the settings, for Python.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <atomic>
#include <cstdlib>

#include "machine.h"

namespace {

std::atomic<size_t> largest{0};  // since it was forgotten

constexpr size_t kAround = 256;  // bytes before and after each, so that what lies beside one is not another
constexpr size_t kFilled = size_t(1) << 30;  // bytes; what is larger stays as the system gives it, which takes no memory until touched

void release(void *at) {
    if (!at) { return; }
    emulator::Memory::instance().remove(at);
    std::free(static_cast<char *>(at) - kAround);
}

struct Watched final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        if (!size) { return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)}; }
        char *whole = static_cast<char *>(std::aligned_alloc(256, (size + 2 * kAround + 255) / 256 * 256));
        TORCH_CHECK(whole, "no memory for ", size, " bytes");
        char *at = whole + kAround;
        for (size_t known = largest; known < size && !largest.compare_exchange_weak(known, size);) {}
        if (size <= kFilled) { std::memset(at, 0xff, size); }
        emulator::Memory::instance().add(at, size);
        return {at, at, &release, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, size_t size) const override { std::memcpy(to, from, size); }
};

Watched watched;
const bool set = (c10::SetCPUAllocator(&watched, 255), true);

}  // namespace

extern "C" {
void emulator_set(int processors, int order, int races, int resident) {
    emulator::Options &all = emulator::options();
    all.processors = uint32_t(processors), all.order = order, all.races = races != 0, all.resident = uint32_t(resident);
}
unsigned long long emulator_largest() { return largest; }
void emulator_forget_largest() { largest = 0; }
unsigned long long emulator_launches() { return emulator::options().launches; }
unsigned long long emulator_instructions() { return emulator::options().instructions; }
}

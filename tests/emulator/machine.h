// Thread blocks and warps, and the memory that they may touch.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "ptx.h"

namespace emulator {

struct Dim {
    uint32_t x = 1, y = 1, z = 1;
    uint64_t count() const { return uint64_t(x) * y * z; }
};

// The allocations that kernels may touch. What lies beside them is an error, as under compute-sanitizer's memcheck.
class Memory {
public:
    static Memory &instance();
    void add(const void *at, size_t size);
    void remove(const void *at);
    bool holds(uint64_t at, size_t size);

private:
    std::mutex mutex_;
    std::map<uint64_t, uint64_t> ranges_;  // start to end
    uint64_t last_start_ = 0, last_end_ = 0;
};

struct Launch {
    const Code *code;
    Dim grid, block;
    uint32_t shared_bytes;  // static and dynamic
    std::vector<char> params;
};

struct Copy {  // cp.async: it takes place when it is waited for, so that a missing wait shows
    uint32_t lane, group;
    uint64_t source;
    uint32_t target, size, filled;
};

struct Fragment {
    uint32_t pc, lanes;
};

struct Block;

struct Warp {
    Block *block = nullptr;
    char *r = nullptr;
    char *local = nullptr;
    uint32_t index = 0, alive = 0;
    bool at_barrier = false;
    uint32_t barrier = 0;
    const Inst *voting = nullptr;   // a barrier that tells each warp what all lanes of the block voted for
    std::vector<Fragment> waiting;  // lanes that are not running, by falling pc
    Fragment running{};
    Fragment early{};               // lanes that came to a barrier before the others
    std::vector<Copy> copies;
    std::array<uint32_t, kLanes> group{};

    template <typename T>
    T *lanes(uint32_t at) const {
        return reinterpret_cast<T *>(r + at);
    }
    uint32_t &bits(uint32_t at) const { return *reinterpret_cast<uint32_t *>(r + at); }
};

struct Block {
    const Launch *launch;
    Dim at;
    std::vector<char> shared;
    std::vector<Warp> warps;
    // Who touched a byte of shared memory last since the last barrier: a race where two warps did and one wrote.
    std::vector<uint16_t> writer, reader;

    char *address(Warp &warp, const Inst &inst, uint32_t lane, uint64_t at, uint32_t size, bool write);
    char *in_shared(Warp &warp, const Inst &inst, uint32_t lane, uint64_t at, uint32_t size, bool write);
    [[noreturn]] void fault(const Warp &warp, const Inst &inst, uint32_t lane, const std::string &what) const;
};

struct Options {
    uint32_t processors = 132;          // multiprocessors that the device claims to have
    int order = 0;                      // of blocks and warps: 0 as they come, else a seed
    bool races = true;
    uint32_t resident = 1;              // blocks that run side by side
    uint64_t launches = 0, instructions = 0;
};
Options &options();

void run(Module &module, const Launch &launch);

}  // namespace emulator

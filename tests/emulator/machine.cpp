// Running a grid: some blocks side by side, in each the warps in turn, up to a barrier or for a while.
#include "machine.h"

#include <xmmintrin.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>
#include <sstream>
#include <utility>

namespace emulator {

Options &options() {
    static Options all;
    return all;
}

Memory &Memory::instance() {
    static Memory memory;
    return memory;
}

void Memory::add(const void *at, size_t size) {
    const std::lock_guard lock(mutex_);
    ranges_[reinterpret_cast<uint64_t>(at)] = reinterpret_cast<uint64_t>(at) + size;
    last_end_ = 0;
}

void Memory::remove(const void *at) {
    const std::lock_guard lock(mutex_);
    ranges_.erase(reinterpret_cast<uint64_t>(at));
    last_end_ = 0;
}

bool Memory::holds(uint64_t at, size_t size) {
    const std::lock_guard lock(mutex_);
    if (at >= last_start_ && at + size <= last_end_) { return true; }
    auto after = ranges_.upper_bound(at);
    if (after == ranges_.begin()) { return false; }
    --after;
    if (at + size > after->second) { return false; }
    last_start_ = after->first, last_end_ = after->second;
    return true;
}

void Block::fault(const Warp &warp, const Inst &inst, uint32_t lane, const std::string &what) const {
    std::ostringstream text;
    text << what << " at line " << inst.line << ", block (" << at.x << ", " << at.y << ", " << at.z << "), thread " << warp.index * kLanes + lane;
    throw Fault(text.str());
}

char *Block::in_shared(Warp &warp, const Inst &inst, uint32_t lane, uint64_t at, uint32_t size, bool write) {
    if (at + size > shared.size()) { fault(warp, inst, lane, "shared memory " + std::to_string(at) + " of " + std::to_string(shared.size()) + " bytes"); }
    if (at % std::bit_floor(size)) { fault(warp, inst, lane, "misaligned address in shared memory"); }
    if (!writer.empty()) {
        const uint16_t self = uint16_t(warp.index + 1);
        for (uint64_t n = at; n < at + size; ++n) {
            if (writer[n] && writer[n] != self) { fault(warp, inst, lane, std::string("race in shared memory: ") + (write ? "written" : "read") + " after warp " + std::to_string(writer[n] - 1) + " wrote"); }
            if (write) {
                if (reader[n] && reader[n] != self) { fault(warp, inst, lane, "race in shared memory: written after warp " + std::to_string(reader[n] == 0xffff ? -1 : reader[n] - 1) + " read"); }
                writer[n] = self;
            } else {
                reader[n] = reader[n] && reader[n] != self ? 0xffff : self;
            }
        }
    }
    return shared.data() + at;
}

char *Block::address(Warp &warp, const Inst &inst, uint32_t lane, uint64_t at, uint32_t size, bool write) {
    const auto base = reinterpret_cast<uint64_t>(shared.data());
    if (at >= base && at < base + shared.size()) { return in_shared(warp, inst, lane, at - base, size, write); }
    const auto local = reinterpret_cast<uint64_t>(warp.local) + uint64_t(lane) * launch->code->local_bytes;
    const auto params = reinterpret_cast<uint64_t>(launch->params.data());
    const bool own = (at >= local && at + size <= local + launch->code->local_bytes) || (!write && at >= params && at + size <= params + launch->params.size());
    if (!own && !Memory::instance().holds(at, size)) {
        std::ostringstream text;
        text << (write ? "write" : "read") << " of " << size << " bytes outside any allocation (0x" << std::hex << at << ")";
        fault(warp, inst, lane, text.str());
    }
    if (at % std::bit_floor(size)) { fault(warp, inst, lane, "misaligned address"); }
    return reinterpret_cast<char *>(at);
}

namespace {

// A warp that waits for another block must let it run; a launch that takes this many instructions will never end.
constexpr uint64_t kSlice = 2000, kEndless = 5'000'000'000;

// Runs a warp to its next barrier, its end, or the end of its slice.
void advance(Warp &w, const Code &code, uint64_t &executed) {
    const uint64_t pause = executed + kSlice;
    w.at_barrier = false;
    const auto take_next = [&w] {
        if (w.waiting.empty()) {
            w.running = std::exchange(w.early, {});
            return;
        }
        w.running = w.waiting.back();
        w.waiting.pop_back();
    };
    const auto park = [&w](Fragment fragment) {
        for (Fragment &other : w.waiting) {
            if (other.pc == fragment.pc) {
                other.lanes |= fragment.lanes;
                return;
            }
        }
        const auto place = std::find_if(w.waiting.begin(), w.waiting.end(), [&](const Fragment &f) { return f.pc < fragment.pc; });
        w.waiting.insert(place, fragment);
    };
    if (!w.running.lanes) { take_next(); }
    while (w.running.lanes && executed < pause) {
        const Inst &inst = code.insts[w.running.pc];
        if (inst.joins && !w.waiting.empty()) {
            if (w.waiting.back().pc < w.running.pc) {  // the lowest goes first, so that lanes meet again
                park(w.running);
                take_next();
                continue;
            }
            if (w.waiting.back().pc == w.running.pc) {
                w.running.lanes |= w.waiting.back().lanes;
                w.waiting.pop_back();
            }
        }
        uint32_t mask = w.running.lanes;
        if (inst.guard >= 0) { mask &= inst.negated ? ~w.bits(inst.guard) : w.bits(inst.guard); }
        ++executed;
        switch (inst.flow) {
            case Flow::Next:
                if (mask) { inst.run(w, inst, mask); }
                ++w.running.pc;
                break;
            case Flow::Branch:
                if (mask == w.running.lanes) {
                    w.running.pc = inst.target;
                } else if (mask) {
                    park({inst.target, mask});
                    w.running.lanes &= ~mask;
                    ++w.running.pc;
                } else {
                    ++w.running.pc;
                }
                break;
            case Flow::Exit:
                if (mask && w.early.lanes) { w.block->fault(w, inst, std::countr_zero(mask), "a lane does not come to the barrier of its warp"); }
                w.alive &= ~mask;
                w.running.lanes &= ~mask;
                ++w.running.pc;
                if (!w.running.lanes) { take_next(); }
                break;
            case Flow::Barrier:
                if (w.early.lanes && w.early.pc == w.running.pc) { mask |= std::exchange(w.early, {}).lanes; }
                if (mask != w.alive && !w.early.lanes && !w.waiting.empty()) {  // the others may come by a way that lies behind
                    w.early = {w.running.pc, mask};
                    take_next();
                    break;
                }
                w.running.lanes = mask;
                if (mask != w.alive) { w.block->fault(w, inst, std::countr_zero(w.alive & ~mask), "a lane does not come to the barrier of its warp"); }
                ++w.running.pc;
                w.at_barrier = true;
                w.barrier = uint32_t(inst.offset) << 16 | inst.option;
                w.voting = inst.size ? &inst : nullptr;
                return;
            case Flow::Unknown:
                if (mask) { w.block->fault(w, inst, std::countr_zero(mask), "an instruction that the emulator does not know"); }
                ++w.running.pc;
        }
    }
}

// A block that runs, with its registers and memory.
class Resident {
public:
    explicit Resident(const Launch &launch) : launch_(launch), code_(*launch.code) {
        warps_ = uint32_t((launch.block.count() + kLanes - 1) / kLanes);
        // A register that was not set holds a NaN.
        image_.assign(code_.register_bytes, char(0xff));
        for (const Constant &c : code_.constants) { set(image_.data(), c.at, c.width, c.value); }
        registers_.resize(size_t(code_.register_bytes) * warps_ + 64);
        local_.resize(size_t(code_.local_bytes) * kLanes * warps_ + 16);
        block_.launch = &launch_;
        block_.shared.resize(launch.shared_bytes);
        block_.warps.resize(warps_);
        order_.resize(warps_);
        std::iota(order_.begin(), order_.end(), 0);
        if (options().races) { block_.writer.resize(launch.shared_bytes), block_.reader.resize(launch.shared_bytes); }
    }
    Resident(const Resident &) = delete;

    void begin(Dim at) {
        block_.at = at;
        std::fill(block_.shared.begin(), block_.shared.end(), char(0xff));
        std::fill(local_.begin(), local_.end(), char(0xff));
        forget();
        for (uint32_t n = 0; n < warps_; ++n) { start(n); }
    }

    // Runs each warp for a while; false when the block has ended.
    bool step(std::mt19937 &random, uint64_t &executed) {
        if (options().order) { std::shuffle(order_.begin(), order_.end(), random); }
        bool any = false;
        for (const uint32_t n : order_) {
            Warp &w = block_.warps[n];
            if (!w.at_barrier && w.alive) { advance(w, code_, executed), any = true; }
        }
        return release() || any;
    }

private:
    static void set(char *file, uint32_t at, uint8_t width, uint64_t value) {
        if (width == 1) {
            std::memcpy(file + at, &value, 4);
        } else {
            for (int l = 0; l < kLanes; ++l) { std::memcpy(file + at + l * width, &value, width); }
        }
    }

    void forget() {
        std::fill(block_.writer.begin(), block_.writer.end(), 0);
        std::fill(block_.reader.begin(), block_.reader.end(), 0);
    }

    // Lets warps pass a barrier that all who are expected have come to.
    bool release() {
        std::map<uint32_t, uint32_t> waiting;
        uint32_t alive = 0;
        for (const Warp &w : block_.warps) {
            alive += w.alive != 0;
            if (w.at_barrier) { ++waiting[w.barrier]; }
        }
        bool released = false;
        for (const auto &[barrier, count] : waiting) {
            const uint32_t expected = barrier & 0xffff ? barrier & 0xffff : alive;
            if (count < expected) { continue; }
            bool any = false, all = true;
            uint32_t votes_for = 0;
            for (Warp &w : block_.warps) {
                if (!w.at_barrier || w.barrier != barrier || !w.voting) { continue; }
                const uint32_t votes = w.bits(w.voting->r[1]) & w.alive;
                any |= votes != 0, all &= votes == w.alive, votes_for += uint32_t(std::popcount(votes));
            }
            for (Warp &w : block_.warps) {
                if (!w.at_barrier || w.barrier != barrier) { continue; }
                if (w.voting && w.voting->size == Count) {
                    std::fill_n(w.lanes<uint32_t>(w.voting->r[0]), kLanes, votes_for);
                } else if (w.voting) {
                    w.bits(w.voting->r[0]) = (w.voting->size == Any ? any : all) ? kAll : 0;
                }
                w.at_barrier = false;
            }
            if (count == alive) { forget(); }  // a barrier of some warps orders those alone: what they touched stays noted
            released = true;
        }
        if (!released && !waiting.empty()) {
            for (const Warp &w : block_.warps) {
                if (w.alive && !w.at_barrier) { return true; }
            }
            throw Fault("warps wait at a barrier that others do not come to");
        }
        return released;
    }

    void start(uint32_t n) {
        Warp &w = block_.warps[n];
        w = Warp{};
        w.block = &block_, w.index = n;
        char *aligned = reinterpret_cast<char *>((reinterpret_cast<uint64_t>(registers_.data()) + 63) / 64 * 64);
        w.r = aligned + size_t(code_.register_bytes) * n;
        w.local = local_.data() + size_t(code_.local_bytes) * kLanes * n;
        std::memcpy(w.r, image_.data(), image_.size());
        const uint64_t threads = launch_.block.count();
        const uint64_t here = std::min<uint64_t>(kLanes, threads - uint64_t(n) * kLanes);
        w.alive = here == kLanes ? kAll : (1u << here) - 1;
        w.running = {0, w.alive};
        for (const Symbol &s : code_.symbols) {
            if (s.kind == Symbol::Global) { continue; }
            for (int l = 0; l < kLanes; ++l) {
                uint64_t value = s.offset;
                if (s.kind == Symbol::Param) { value += reinterpret_cast<uint64_t>(launch_.params.data()); }
                if (s.kind == Symbol::Local) { value += reinterpret_cast<uint64_t>(w.local) + uint64_t(l) * code_.local_bytes; }
                if (s.kind == Symbol::Dynamic) { value = (code_.shared_bytes + 15) / 16 * 16; }
                w.lanes<uint64_t>(s.at)[l] = value;
            }
        }
        for (const Symbol &s : code_.symbols) {
            if (s.kind != Symbol::Global) { continue; }
            for (int l = 0; l < kLanes; ++l) { w.lanes<uint32_t>(s.at)[l] = uint32_t(w.lanes<uint64_t>(uint32_t(s.offset))[l]); }
        }
        for (const auto &[name, at] : code_.special) {
            for (int l = 0; l < kLanes; ++l) { w.lanes<uint32_t>(at)[l] = special(name, n * kLanes + uint32_t(l), n, uint32_t(l)); }
        }
    }

    uint32_t special(const std::string &name, uint32_t thread, uint32_t warp, uint32_t lane) const {
        const Dim &b = launch_.block, &g = launch_.grid, &at = block_.at;
        if (name == "%tid.x") { return thread % b.x; }
        if (name == "%tid.y") { return thread / b.x % b.y; }
        if (name == "%tid.z") { return thread / b.x / b.y; }
        if (name == "%ntid.x") { return b.x; }
        if (name == "%ntid.y") { return b.y; }
        if (name == "%ntid.z") { return b.z; }
        if (name == "%ctaid.x") { return at.x; }
        if (name == "%ctaid.y") { return at.y; }
        if (name == "%ctaid.z") { return at.z; }
        if (name == "%nctaid.x") { return g.x; }
        if (name == "%nctaid.y") { return g.y; }
        if (name == "%nctaid.z") { return g.z; }
        if (name == "%laneid") { return lane; }
        if (name == "%warpid") { return warp; }
        if (name == "%smid") { return at.x % options().processors; }
        if (name == "%nsmid") { return options().processors; }
        if (name == "%dynamic_smem_size") { return launch_.shared_bytes - code_.shared_bytes; }
        if (name == "%globaltimer_hi") { return 0; }  // no time passes: who waits for ever is found by kEndless
        throw Fault("special register " + name);
    }

    const Launch &launch_;
    const Code &code_;
    uint32_t warps_;
    std::vector<char> image_, registers_, local_;
    std::vector<uint32_t> order_;
    Block block_;
};

}  // namespace

void run(Module &module, const Launch &launch) {
    const unsigned modes = _mm_getcsr();
    _mm_setcsr(modes | 0x8040);  // kernels flush denormal numbers (--use_fast_math)
    struct Restore {
        unsigned modes;
        ~Restore() { _mm_setcsr(modes); }
    } restore{modes};
    std::vector<uint64_t> waiting(launch.grid.count());
    std::iota(waiting.rbegin(), waiting.rend(), 0);
    std::mt19937 random(uint32_t(options().order));
    if (options().order) { std::shuffle(waiting.begin(), waiting.end(), random); }
    ++options().launches;
    uint64_t executed = 0;
    try {
        std::vector<std::unique_ptr<Resident>> residents(std::min<uint64_t>(options().resident, waiting.size()));
        const auto begin_next = [&](std::unique_ptr<Resident> &resident) {
            if (waiting.empty()) {
                resident.reset();
                return;
            }
            if (!resident) { resident = std::make_unique<Resident>(launch); }
            const uint64_t n = waiting.back();
            waiting.pop_back();
            resident->begin({uint32_t(n % launch.grid.x), uint32_t(n / launch.grid.x % launch.grid.y), uint32_t(n / launch.grid.x / launch.grid.y)});
        };
        for (auto &resident : residents) { begin_next(resident); }
        while (!residents.empty()) {
            if (options().order) { std::shuffle(residents.begin(), residents.end(), random); }
            for (auto &resident : residents) {
                if (!resident->step(random, executed)) { begin_next(resident); }
            }
            std::erase(residents, nullptr);
            if (executed > kEndless) { throw Fault("the kernel does not end: is a block waited for that never begins?"); }
        }
        options().instructions += executed;
    } catch (const Fault &fault) {
        std::string text = fault.what();
        if (const auto at = text.find("at line "); at != std::string::npos) { text += ": " + module.line(uint32_t(std::stoul(text.substr(at + 8)))); }
        throw Fault(text + "\n  in " + Module::readable(launch.code->name));
    }
}

}  // namespace emulator

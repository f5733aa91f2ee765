// What a PTX module is to the emulator: functions decoded into instructions whose operands are places in a warp's
// register file. PTX is nvcc's own output before ptxas, so the code that runs here is the code of the kernels but for
// register allocation and scheduling. Source: PTX ISA 9.0, https://docs.nvidia.com/cuda/parallel-thread-execution/.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace emulator {

constexpr int kLanes = 32;
constexpr uint32_t kAll = 0xffffffffu;

struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Warp;
struct Inst;
using Handler = void (*)(Warp &, const Inst &, uint32_t mask);

enum class Flow : uint8_t { Next, Branch, Exit, Barrier, Unknown };
enum Vote : uint8_t { None, Any, All, Count };  // of a barrier

// A register operand is a byte offset into the warp's register file: 32 lanes of 4 bytes (b16, b32, f32) or 8 (b64),
// or one word with a bit a lane (predicates). Immediates and addresses of symbols are registers that are set before
// the first instruction.
struct Inst {
    Handler run = nullptr;
    Flow flow = Flow::Next;
    bool joins = false;         // other lanes may wait here
    bool negated = false;
    int32_t guard = -1;         // predicate
    uint32_t target = 0;        // of a branch
    std::array<uint32_t, 12> r{};
    int64_t offset = 0;         // of an address
    uint8_t count = 1;          // elements of a vector, or options
    uint8_t wide = 0;           // an address register of 64 bits
    uint8_t size = 4;           // bytes an element, or a barrier's vote
    uint8_t space = 0;
    bool is_signed = false;
    uint16_t option = 0;
    uint32_t line = 0;          // in the module's text
};

struct Constant {
    uint32_t at;
    uint8_t width;              // 4, 8, or 1 for a predicate
    uint64_t value;
};

struct Symbol {
    enum Kind { Param, Local, Shared, Dynamic, Global } kind;
    uint32_t at;                // register of its address
    uint64_t offset;
};

struct Code {
    std::string name;
    std::vector<Inst> insts;
    std::vector<Constant> constants;
    std::vector<Symbol> symbols;
    uint32_t register_bytes = 0, local_bytes = 0, shared_bytes = 0;
    std::map<std::string, uint32_t> special;    // %tid.x and the like
    std::vector<uint32_t> param_offsets;
    std::vector<uint32_t> param_sizes;
};

class Module {
public:
    explicit Module(std::string text);
    const Code &code(const std::string &name);  // decoded when first asked for
    bool has(const std::string &name) const { return functions_.count(name) != 0; }
    std::string line(uint32_t number) const;
    static std::string readable(const std::string &mangled);

private:
    friend class Decoder;
    struct Function {
        std::string_view head, body;
        uint32_t line;
    };
    struct Variable {
        uint64_t address;       // of a global; its size for shared
        bool shared;
        bool dynamic;
    };
    std::string text_;
    std::unordered_map<std::string, Function> functions_;
    std::unordered_map<std::string, Variable> variables_;
    std::unordered_map<std::string, std::unique_ptr<Code>> decoded_;
    std::vector<std::unique_ptr<char[]>> storage_;
    std::vector<std::unique_ptr<uint32_t[]>> lists_;
};

}  // namespace emulator

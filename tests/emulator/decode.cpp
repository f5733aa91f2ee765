// PTX text to instructions.
#include <cxxabi.h>
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include "machine.h"
#include "tensor_core.h"

namespace emulator {
namespace {

// ---- what instructions do ----

template <typename T>
void store(Warp &w, uint32_t at, const T (&value)[kLanes], uint32_t mask) {
    T *to = w.lanes<T>(at);
    if (mask == kAll) {
        std::memcpy(to, value, sizeof value);
    } else {
        for (int l = 0; l < kLanes; ++l) {
            if (mask >> l & 1) { to[l] = value[l]; }
        }
    }
}

template <typename D, typename A, typename F>
void unary(Warp &w, const Inst &i, uint32_t mask) {
    const A *a = w.lanes<A>(i.r[1]);
    D out[kLanes];
    for (int l = 0; l < kLanes; ++l) { out[l] = F{}(a[l]); }
    store(w, i.r[0], out, mask);
}

template <typename D, typename A, typename B, typename F>
void binary(Warp &w, const Inst &i, uint32_t mask) {
    const A *a = w.lanes<A>(i.r[1]);
    const B *b = w.lanes<B>(i.r[2]);
    D out[kLanes];
    for (int l = 0; l < kLanes; ++l) { out[l] = F{}(a[l], b[l]); }
    store(w, i.r[0], out, mask);
}

template <typename D, typename A, typename C, typename F>
void ternary(Warp &w, const Inst &i, uint32_t mask) {
    const A *a = w.lanes<A>(i.r[1]), *b = w.lanes<A>(i.r[2]);
    const C *c = w.lanes<C>(i.r[3]);
    D out[kLanes];
    for (int l = 0; l < kLanes; ++l) { out[l] = F{}(a[l], b[l], c[l]); }
    store(w, i.r[0], out, mask);
}

void write_bits(Warp &w, uint32_t at, uint32_t value, uint32_t mask) { w.bits(at) = (w.bits(at) & ~mask) | (value & mask); }

template <typename A, typename F>
void compare(Warp &w, const Inst &i, uint32_t mask) {
    const A *a = w.lanes<A>(i.r[1]), *b = w.lanes<A>(i.r[2]);
    uint32_t yes = 0;
    for (int l = 0; l < kLanes; ++l) { yes |= uint32_t(F{}(a[l], b[l])) << l; }
    uint32_t no = ~yes;
    if (i.option) {  // combined with a predicate
        const uint32_t c = w.bits(i.r[3]);
        if (i.option == 1) { yes &= c, no &= c; }
        if (i.option == 2) { yes |= c, no |= c; }
        if (i.option == 3) { yes ^= c, no ^= c; }
    }
    write_bits(w, i.r[0], yes, mask);
    if (i.count == 2) { write_bits(w, i.r[4], no, mask); }
}

template <typename T, typename F>
void compare_to_mask(Warp &w, const Inst &i, uint32_t mask) {  // set.OP.u32.T
    const T *a = w.lanes<T>(i.r[1]), *b = w.lanes<T>(i.r[2]);
    uint32_t out[kLanes];
    for (int l = 0; l < kLanes; ++l) { out[l] = F{}(a[l], b[l]) ? ~0u : 0u; }
    store(w, i.r[0], out, mask);
}

template <typename F>
void predicate(Warp &w, const Inst &i, uint32_t mask) {
    const uint32_t a = i.count & 1 ? ~w.bits(i.r[1]) : w.bits(i.r[1]);
    const uint32_t b = i.count & 2 ? ~w.bits(i.r[2]) : w.bits(i.r[2]);
    write_bits(w, i.r[0], F{}(a, b), mask);
}

template <typename T>
void select(Warp &w, const Inst &i, uint32_t mask) {
    const T *a = w.lanes<T>(i.r[1]), *b = w.lanes<T>(i.r[2]);
    const uint32_t p = w.bits(i.r[3]);
    T out[kLanes];
    for (int l = 0; l < kLanes; ++l) { out[l] = p >> l & 1 ? a[l] : b[l]; }
    store(w, i.r[0], out, mask);
}

uint16_t float_to_half(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
uint16_t float_to_bfloat(float f) {
    if (std::isnan(f)) { return 0x7fff; }
    const uint32_t u = std::bit_cast<uint32_t>(f);
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// D = A B + C of 16 by 8 by Depth, fragments as the ISA gives them (mma.m16n8k16 and .m16n8k8 with .f16 and .bf16).
template <typename Format, int Depth>
void mma(Warp &w, const Inst &i, uint32_t mask) {
    if (mask != kAll) { w.block->fault(w, i, 0, "mma.sync without all lanes"); }
    uint16_t a[16][Depth], b[Depth][8];
    float c[16][8];
    for (int l = 0; l < kLanes; ++l) {
        const int row = l / 4, col = l % 4 * 2;
        for (int e = 0; e < Depth / 4; ++e) {
            const uint32_t v = w.lanes<uint32_t>(i.r[4 + e])[l];
            a[row + e % 2 * 8][col + e / 2 * 8] = uint16_t(v);
            a[row + e % 2 * 8][col + e / 2 * 8 + 1] = uint16_t(v >> 16);
        }
    }
    // r holds d0..d3, a0..a3; b and c are in the two lists that follow it
    const uint32_t *more = reinterpret_cast<const uint32_t *>(i.offset);
    for (int l = 0; l < kLanes; ++l) {
        const int row = l / 4, col = l % 4 * 2;
        for (int e = 0; e < Depth / 8; ++e) {
            const uint32_t v = w.lanes<uint32_t>(more[e])[l];
            b[col + e * 8][row] = uint16_t(v);
            b[col + e * 8 + 1][row] = uint16_t(v >> 16);
        }
        for (int e = 0; e < 4; ++e) { c[row + e / 2 * 8][col + e % 2] = w.lanes<float>(more[2 + e])[l]; }
    }
    multiply_add<Format>(a, b, c);
    for (int l = 0; l < kLanes; ++l) {
        const int row = l / 4, col = l % 4 * 2;
        for (int e = 0; e < 4; ++e) { w.lanes<float>(i.r[e])[l] = c[row + e / 2 * 8][col + e % 2]; }
    }
}

enum Space : uint8_t { Generic, Shared };

template <typename T>
uint64_t address_of(const Warp &w, const Inst &i, uint32_t at, int l) {
    return uint64_t(w.lanes<T>(at)[l] + T(i.offset));
}

uint64_t address_of(const Warp &w, const Inst &i, uint32_t at, int l) {
    return i.wide ? address_of<uint64_t>(w, i, at, l) : address_of<uint32_t>(w, i, at, l);
}

char *place(Warp &w, const Inst &i, int l, uint64_t at, uint32_t size, bool write) {
    return i.space == Shared ? w.block->in_shared(w, i, l, at, size, write) : w.block->address(w, i, l, at, size, write);
}

// ld: r[0] is the address, r[1...] the targets; st: likewise the sources.
void load(Warp &w, const Inst &i, uint32_t mask) {
    uint64_t at[kLanes];
    for (int l = 0; l < kLanes; ++l) { at[l] = mask >> l & 1 ? address_of(w, i, i.r[0], l) : 0; }
    for (int l = 0; l < kLanes; ++l) {
        if (!(mask >> l & 1)) { continue; }
        const char *from = place(w, i, l, at[l], i.size * i.count, false);
        for (int e = 0; e < i.count; ++e, from += i.size) {
            uint64_t value = 0;
            std::memcpy(&value, from, i.size);
            if (i.is_signed && i.size < 8) { value = uint64_t(int64_t(value << (64 - 8 * i.size)) >> (64 - 8 * i.size)); }
            if (i.option >> e & 1) {
                w.lanes<uint64_t>(i.r[1 + e])[l] = value;
            } else {
                w.lanes<uint32_t>(i.r[1 + e])[l] = uint32_t(value);
            }
        }
    }
}

void save(Warp &w, const Inst &i, uint32_t mask) {
    for (int l = 0; l < kLanes; ++l) {
        if (!(mask >> l & 1)) { continue; }
        char *to = place(w, i, l, address_of(w, i, i.r[0], l), i.size * i.count, true);
        for (int e = 0; e < i.count; ++e, to += i.size) {
            const uint64_t value = i.option >> e & 1 ? w.lanes<uint64_t>(i.r[1 + e])[l] : w.lanes<uint32_t>(i.r[1 + e])[l];
            std::memcpy(to, &value, i.size);
        }
    }
}

// atom and red, 32 bits: r[0] address, r[1] old value or nowhere, r[2] operand, r[3] for cas the new one.
template <typename T, typename F>
void atomic(Warp &w, const Inst &i, uint32_t mask) {
    for (int l = 0; l < kLanes; ++l) {
        if (!(mask >> l & 1)) { continue; }
        char *at = place(w, i, l, address_of(w, i, i.r[0], l), sizeof(T), true);
        T before;
        std::memcpy(&before, at, sizeof before);
        const T after = F{}(before, w.lanes<T>(i.r[2])[l], w.lanes<T>(i.r[3])[l]);
        std::memcpy(at, &after, sizeof after);
        if (i.count) { w.lanes<T>(i.r[1])[l] = before; }
    }
}

void copy_async(Warp &w, const Inst &i, uint32_t mask) {
    for (int l = 0; l < kLanes; ++l) {
        if (!(mask >> l & 1)) { continue; }
        const uint32_t target = i.wide ? uint32_t(w.lanes<uint64_t>(i.r[0])[l]) : w.lanes<uint32_t>(i.r[0])[l];
        const uint32_t size = w.lanes<uint32_t>(i.r[2])[l];
        const uint32_t read = std::min(size, w.lanes<uint32_t>(i.r[3])[l]);
        const uint64_t source = w.lanes<uint64_t>(i.r[1])[l];
        if (read) { w.block->address(w, i, l, source, read, false); }
        if (source % size) { w.block->fault(w, i, l, "misaligned cp.async"); }
        w.block->in_shared(w, i, l, target, size, true);
        w.copies.push_back({uint32_t(l), w.group[l], source, target, size, read});
    }
}

void commit_group(Warp &w, const Inst &, uint32_t mask) {
    for (int l = 0; l < kLanes; ++l) { w.group[l] += mask >> l & 1; }
}

void wait_group(Warp &w, const Inst &i, uint32_t mask) {
    const bool everything = i.option;
    auto done = [&](const Copy &c) {
        if (!(mask >> c.lane & 1) || (!everything && c.group + uint32_t(i.offset) >= w.group[c.lane])) { return false; }
        char *to = w.block->in_shared(w, i, c.lane, c.target, c.size, true);
        std::memset(to, 0, c.size);
        if (c.filled) { std::memcpy(to, reinterpret_cast<const char *>(c.source), c.filled); }
        return true;
    };
    std::erase_if(w.copies, done);
}

template <int Matrices, bool Transposed>
void load_matrix(Warp &w, const Inst &i, uint32_t mask) {
    if (mask != kAll) { w.block->fault(w, i, 0, "ldmatrix.sync without all lanes"); }
    for (int m = 0; m < Matrices; ++m) {
        uint16_t tile[8][8];
        for (int row = 0; row < 8; ++row) {
            const int l = m * 8 + row;
            std::memcpy(tile[row], w.block->in_shared(w, i, l, address_of(w, i, i.r[0], l), 16, false), 16);
        }
        uint32_t out[kLanes];
        for (int l = 0; l < kLanes; ++l) {
            const int row = l / 4, col = l % 4 * 2;
            const uint16_t low = Transposed ? tile[col][row] : tile[row][col], high = Transposed ? tile[col + 1][row] : tile[row][col + 1];
            out[l] = low | uint32_t(high) << 16;
        }
        store(w, i.r[1 + m], out, mask);
    }
}

void check_members(Warp &w, const Inst &i, uint32_t mask, uint32_t members) {
    if (members & w.alive & ~mask) { w.block->fault(w, i, std::countr_zero(members & w.alive & ~mask), "a lane of the member mask does not take part"); }
}

template <int Mode>  // bfly, up, down, idx
void shuffle(Warp &w, const Inst &i, uint32_t mask) {
    const uint32_t *a = w.lanes<uint32_t>(i.r[1]), *b = w.lanes<uint32_t>(i.r[2]), *c = w.lanes<uint32_t>(i.r[3]);
    check_members(w, i, mask, w.lanes<uint32_t>(i.r[4])[std::countr_zero(mask)]);
    uint32_t out[kLanes], valid = 0;
    for (int l = 0; l < kLanes; ++l) {
        const int segment = int(c[l] >> 8 & 31), clamp = int(c[l] & 31), by = int(b[l] & 31);
        const int top = (l & segment) | (clamp & ~segment), bottom = l & segment;
        int from = l;
        bool ok = false;
        if (Mode == 0) { from = l ^ by, ok = from <= top; }
        if (Mode == 1) { from = l - by, ok = from >= top; }
        if (Mode == 2) { from = l + by, ok = from <= top; }
        if (Mode == 3) { from = bottom | (by & ~segment), ok = from <= top; }
        if (!ok) { from = l; }
        out[l] = a[from];
        valid |= uint32_t(ok) << l;
    }
    store(w, i.r[0], out, mask);
    if (i.count == 2) { write_bits(w, i.r[5], valid, mask); }
}

template <int Mode>  // any, all, ballot
void vote(Warp &w, const Inst &i, uint32_t mask) {
    const uint32_t members = w.lanes<uint32_t>(i.r[2])[std::countr_zero(mask)];
    check_members(w, i, mask, members);
    const uint32_t p = (i.count ? ~w.bits(i.r[1]) : w.bits(i.r[1])) & members & mask;
    if (Mode == 2) {
        uint32_t out[kLanes];
        std::fill(out, out + kLanes, p);
        store(w, i.r[0], out, mask);
    } else {
        write_bits(w, i.r[0], (Mode == 0 ? p != 0 : p == (members & mask)) ? kAll : 0, mask);
    }
}

void lookup3(Warp &w, const Inst &i, uint32_t mask) {
    const uint32_t *a = w.lanes<uint32_t>(i.r[1]), *b = w.lanes<uint32_t>(i.r[2]), *c = w.lanes<uint32_t>(i.r[3]);
    const uint32_t table = w.lanes<uint32_t>(i.r[4])[0];
    uint32_t out[kLanes];
    for (int l = 0; l < kLanes; ++l) {
        out[l] = 0;
        for (int bit = 0; bit < 8; ++bit) {
            if (table >> bit & 1) { out[l] |= (bit & 4 ? a[l] : ~a[l]) & (bit & 2 ? b[l] : ~b[l]) & (bit & 1 ? c[l] : ~c[l]); }
        }
    }
    store(w, i.r[0], out, mask);
}

void insert_field(Warp &w, const Inst &i, uint32_t mask) {  // bfi.b32 d, a, b, position, length
    const uint32_t *a = w.lanes<uint32_t>(i.r[1]), *b = w.lanes<uint32_t>(i.r[2]), *position = w.lanes<uint32_t>(i.r[3]), *length = w.lanes<uint32_t>(i.r[4]);
    uint32_t out[kLanes];
    for (int l = 0; l < kLanes; ++l) {
        const uint32_t at = position[l] & 255, many = length[l] & 255;
        const uint64_t field = at >= 32 ? 0 : ((many >= 32 ? 0xffffffffull : (1ull << many) - 1) << at) & 0xffffffffull;
        out[l] = uint32_t((b[l] & ~field) | ((uint64_t(a[l]) << (at & 31)) & field));
    }
    store(w, i.r[0], out, mask);
}

void permute(Warp &w, const Inst &i, uint32_t mask) {
    const uint32_t *a = w.lanes<uint32_t>(i.r[1]), *b = w.lanes<uint32_t>(i.r[2]), *c = w.lanes<uint32_t>(i.r[3]);
    uint32_t out[kLanes];
    for (int l = 0; l < kLanes; ++l) {
        const uint64_t both = a[l] | uint64_t(b[l]) << 32;
        out[l] = 0;
        for (int n = 0; n < 4; ++n) {
            const uint32_t which = c[l] >> (4 * n) & 15;
            uint32_t byte = uint32_t(both >> (8 * (which & 7))) & 255;
            if (which & 8) { byte = byte & 128 ? 255 : 0; }
            out[l] |= byte << (8 * n);
        }
    }
    store(w, i.r[0], out, mask);
}

// mov with vectors: packs r[1...] into r[0], or unpacks r[0] into r[1...]; size is bytes an element.
void pack(Warp &w, const Inst &i, uint32_t mask) {
    for (int l = 0; l < kLanes; ++l) {
        if (!(mask >> l & 1)) { continue; }
        uint64_t value = 0;
        for (int e = 0; e < i.count; ++e) {
            const uint64_t keep = i.size == 8 ? ~0ull : (1ull << (8 * i.size)) - 1;
            value |= (w.lanes<uint32_t>(i.r[1 + e])[l] & keep) << (8 * i.size * e);
        }
        if (i.wide) {
            w.lanes<uint64_t>(i.r[0])[l] = value;
        } else {
            w.lanes<uint32_t>(i.r[0])[l] = uint32_t(value);
        }
    }
}

void unpack(Warp &w, const Inst &i, uint32_t mask) {
    for (int l = 0; l < kLanes; ++l) {
        if (!(mask >> l & 1)) { continue; }
        const uint64_t value = i.wide ? w.lanes<uint64_t>(i.r[0])[l] : w.lanes<uint32_t>(i.r[0])[l];
        for (int e = 0; e < i.count; ++e) {
            const uint32_t part = uint32_t(value >> (8 * i.size * e));
            w.lanes<uint32_t>(i.r[1 + e])[l] = i.size == 2 ? part & 0xffff : part;
        }
    }
}

enum class Type : uint8_t { u8, s8, u16, s16, u32, s32, u64, s64, f16, bf16, f32, f64, b8, b16, b32, b64, pred, f16x2, bf16x2, none };

int bytes(Type t) {
    switch (t) {
        case Type::u8: case Type::s8: case Type::b8: return 1;
        case Type::u16: case Type::s16: case Type::b16: case Type::f16: case Type::bf16: return 2;
        case Type::u64: case Type::s64: case Type::b64: case Type::f64: return 8;
        default: return 4;
    }
}
bool is_float(Type t) { return t == Type::f16 || t == Type::bf16 || t == Type::f32 || t == Type::f64; }
bool is_signed(Type t) { return t == Type::s8 || t == Type::s16 || t == Type::s32 || t == Type::s64; }

std::optional<Type> type_named(std::string_view name) {
    static const std::unordered_map<std::string_view, Type> types{
        {"u8", Type::u8}, {"s8", Type::s8}, {"b8", Type::b8}, {"u16", Type::u16}, {"s16", Type::s16}, {"b16", Type::b16},
        {"u32", Type::u32}, {"s32", Type::s32}, {"b32", Type::b32}, {"u64", Type::u64}, {"s64", Type::s64}, {"b64", Type::b64},
        {"f16", Type::f16}, {"bf16", Type::bf16}, {"f32", Type::f32}, {"f64", Type::f64}, {"pred", Type::pred},
        {"f16x2", Type::f16x2}, {"bf16x2", Type::bf16x2}};
    const auto found = types.find(name);
    return found == types.end() ? std::nullopt : std::optional(found->second);
}

// cvt, one lane at a time: r[1] to r[0]; option holds the two types, count the rounding.
enum Rounding : uint8_t { Nearest, ToZero, Down, Up };

void convert(Warp &w, const Inst &i, uint32_t mask) {
    const Type to = Type(i.option >> 8), from = Type(i.option & 255);
    for (int l = 0; l < kLanes; ++l) {
        if (!(mask >> l & 1)) { continue; }
        double real = 0;
        int64_t whole = 0;
        const uint64_t raw = i.wide ? w.lanes<uint64_t>(i.r[1])[l] : w.lanes<uint32_t>(i.r[1])[l];  // a register may be wider than the type
        switch (from) {
            case Type::f16: real = Fp16::number(uint16_t(raw)); break;
            case Type::bf16: real = Bf16::number(uint16_t(raw)); break;
            case Type::f32: real = std::bit_cast<float>(uint32_t(raw)); break;
            case Type::f64: real = std::bit_cast<double>(raw); break;
            default: {
                const int unused = 64 - 8 * bytes(from);
                whole = is_signed(from) ? int64_t(raw << unused) >> unused : int64_t(raw << unused >> unused);
            }
        }
        uint64_t out = 0;
        if (is_float(to)) {
            if (!is_float(from)) { real = from == Type::u64 ? double(uint64_t(whole)) : double(whole); }
            // From 64 bits a second rounding could differ; no kernel converts such.
            const float single = is_float(from) || bytes(from) < 8 ? float(real) : from == Type::u64 ? float(uint64_t(whole)) : float(whole);
            switch (to) {
                case Type::f16: out = float_to_half(single); break;
                case Type::bf16: out = float_to_bfloat(single); break;
                case Type::f32: out = std::bit_cast<uint32_t>(single); break;
                default: out = std::bit_cast<uint64_t>(real);
            }
        } else if (is_float(from)) {
            double r = i.count == ToZero ? std::trunc(real) : i.count == Down ? std::floor(real) : i.count == Up ? std::ceil(real) : std::nearbyint(real);
            const double high = is_signed(to) ? std::ldexp(1.0, 8 * bytes(to) - 1) - 1 : std::ldexp(1.0, 8 * bytes(to)) - 1;
            const double low = is_signed(to) ? -std::ldexp(1.0, 8 * bytes(to) - 1) : 0;
            r = std::isnan(r) ? 0 : std::clamp(r, low, high);
            out = is_signed(to) ? uint64_t(int64_t(r)) : uint64_t(r);
        } else {
            out = uint64_t(whole);
            const int unused = 64 - 8 * bytes(to);
            if (unused) { out = is_signed(to) ? uint64_t(int64_t(out << unused) >> unused) : out << unused >> unused; }
        }
        if (i.size == 8) {
            w.lanes<uint64_t>(i.r[0])[l] = out;
        } else {
            w.lanes<uint32_t>(i.r[0])[l] = uint32_t(out) & (bytes(to) == 2 ? 0xffffu : ~0u);
        }
    }
}

template <bool Bfloat, bool Relu = false>
struct Pack2 {  // cvt.rn[.relu].f16x2.f32 d, high, low
    uint32_t operator()(float high, float low) const {
        const auto narrow = [](float f) {
            if (Relu && !(f > 0.f)) { return uint16_t(std::isnan(f) ? 0x7fff : 0); }
            return Bfloat ? float_to_bfloat(f) : float_to_half(f);
        };
        return narrow(low) | uint32_t(narrow(high)) << 16;
    }
};

template <typename F, bool Bfloat>
struct Halves {
    static float wide(uint32_t h) { return Bfloat ? Bf16::number(uint16_t(h)) : Fp16::number(uint16_t(h)); }
    static uint32_t narrow(float f) { return Bfloat ? float_to_bfloat(f) : float_to_half(f); }
    uint32_t operator()(uint32_t a, uint32_t b) const { return narrow(F{}(wide(a), wide(b))) | narrow(F{}(wide(a >> 16), wide(b >> 16))) << 16; }
    uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
        return narrow(F{}(wide(a), wide(b), wide(c))) | narrow(F{}(wide(a >> 16), wide(b >> 16), wide(c >> 16))) << 16;
    }
};
template <typename F>
struct HalvesCompare {
    uint32_t operator()(uint32_t a, uint32_t b) const {
        return (F{}(Fp16::number(uint16_t(a)), Fp16::number(uint16_t(b))) ? 0xffffu : 0) |
               (F{}(Fp16::number(uint16_t(a >> 16)), Fp16::number(uint16_t(b >> 16))) ? 0xffff0000u : 0);
    }
};

#define OPERATION(NAME, ...)                                              \
    struct NAME {                                                         \
        template <typename A> auto operator()(A a) const -> decltype(__VA_ARGS__) { return __VA_ARGS__; } \
    };
#define OPERATION2(NAME, ...)                                             \
    struct NAME {                                                         \
        template <typename A, typename B> auto operator()(A a, B b) const { return __VA_ARGS__; } \
    };
#define OPERATION3(NAME, ...)                                             \
    struct NAME {                                                         \
        template <typename A, typename B, typename C> auto operator()([[maybe_unused]] A a, B b, [[maybe_unused]] C c) const { return __VA_ARGS__; } \
    };
OPERATION(Same, a)
OPERATION(Not, decltype(a)(~a))
OPERATION(Negate, decltype(a)(0 - a))
OPERATION(NegateReal, -a)
OPERATION(NegateHalf, a ^ 0x8000)
OPERATION(NegateHalves, a ^ 0x80008000)
OPERATION(AbsHalves, a & 0x7fff7fff)
OPERATION(Abs, std::abs(a))
OPERATION(Exp2, std::exp2(a))
OPERATION(Log2, std::log2(a))
OPERATION(Reciprocal, 1.0f / a)
OPERATION(Sqrt, std::sqrt(a))
OPERATION(Rsqrt, 1.0f / std::sqrt(a))
OPERATION(Tanh, std::tanh(a))
OPERATION(Sin, std::sin(a))
OPERATION(Cos, std::cos(a))
OPERATION(Popc, uint32_t(std::popcount(a)))
OPERATION(Clz, uint32_t(std::countl_zero(a)))
OPERATION2(Add, decltype(a)(a + b))
OPERATION2(Sub, decltype(a)(a - b))
OPERATION2(Mul, decltype(a)(a * b))
OPERATION2(Divide, b == 0 ? decltype(a)(-1) : decltype(a)(a / b))
OPERATION2(DivideReal, a / b)
OPERATION2(Remainder, b == 0 ? a : decltype(a)(a % b))
OPERATION2(Min, b < a ? b : a)
OPERATION2(Max, a < b ? b : a)
OPERATION2(MinReal, std::fmin(a, b))
OPERATION2(MaxReal, std::fmax(a, b))
OPERATION2(MinOrNaN, std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b))
OPERATION2(MaxOrNaN, std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b))
OPERATION2(And, decltype(a)(a & b))
OPERATION2(Or, decltype(a)(a | b))
OPERATION2(Xor, decltype(a)(a ^ b))
OPERATION2(Left, b >= sizeof(a) * 8 ? decltype(a)(0) : decltype(a)(a << b))
OPERATION2(Right, decltype(a)(b >= sizeof(a) * 8 ? (a < 0 ? -1 : 0) : a >> b))
OPERATION2(Left16, b >= 16 ? 0u : uint32_t(a << b) & 0xffffu)
OPERATION2(Right16, b >= 16 ? 0u : uint32_t(a & 0xffffu) >> b)
OPERATION2(RightSigned16, uint32_t(int32_t(int16_t(a)) >> (b > 15 ? 15 : b)) & 0xffffu)
OPERATION2(Add16, uint32_t(a + b) & 0xffffu)
OPERATION2(Sub16, uint32_t(a - b) & 0xffffu)
OPERATION2(Mul16, uint32_t(a * b) & 0xffffu)
OPERATION2(WideU, uint64_t(a) * uint64_t(b))
OPERATION2(WideS, uint64_t(int64_t(a) * int64_t(b)))
OPERATION2(WideU16, uint32_t(uint16_t(a)) * uint32_t(uint16_t(b)))
OPERATION2(WideS16, uint32_t(int32_t(int16_t(a)) * int32_t(int16_t(b))))
OPERATION2(HighU, uint32_t(uint64_t(a) * uint64_t(b) >> 32))
OPERATION2(HighS, int32_t(int64_t(a) * int64_t(b) >> 32))
OPERATION2(HighU64, uint64_t((unsigned __int128)(a) * (unsigned __int128)(b) >> 64))
OPERATION2(Equal, a == b)
OPERATION2(Unequal, a != b)
OPERATION2(Less, a < b)
OPERATION2(LessEqual, a <= b)
OPERATION2(Greater, a > b)
OPERATION2(GreaterEqual, a >= b)
OPERATION2(Ordered, !(a != a) && !(b != b))
OPERATION2(AndNotNan, a < b || a > b)
OPERATION3(MulAdd, decltype(a)(a * b + c))
OPERATION3(WideAddU, uint64_t(a) * uint64_t(b) + c)
OPERATION3(WideAddS, uint64_t(int64_t(a) * int64_t(b)) + c)
OPERATION3(Fma, std::fma(a, b, c))
OPERATION3(FmaLess, std::fma(a, b, -c))
OPERATION3(LessFma, std::fma(-a, b, c))
OPERATION3(FunnelLeft, uint32_t((uint64_t(b) << 32 | a) << (c & 31) >> 32))
OPERATION3(FunnelRight, uint32_t((uint64_t(b) << 32 | a) >> (c & 31)))
OPERATION3(TakeAdd, decltype(a)(a + b))
OPERATION3(TakeMax, a < b ? b : a)
OPERATION3(TakeMin, b < a ? b : a)
OPERATION3(TakeOr, decltype(a)(a | b))
OPERATION3(TakeAnd, decltype(a)(a & b))
OPERATION3(Exchange, b)
OPERATION3(CompareSwap, a == b ? c : a)
OPERATION3(FieldU, (b & 255) >= 32 ? 0u : (uint32_t(a) >> (b & 255)) & ((c & 255) >= 32 ? ~0u : (1u << (c & 255)) - 1))

// A product that sums are fused with. Its factors stay in r[3] and r[4]: their own registers may change before the sum.
void keep_factors(Warp &w, const Inst &i, uint32_t mask) {
    float factors[2][kLanes], product[kLanes];
    for (int n = 0; n < 2; ++n) { std::memcpy(factors[n], w.lanes<float>(i.r[1 + n]), sizeof factors[n]); }
    for (int l = 0; l < kLanes; ++l) { product[l] = factors[0][l] * factors[1][l]; }
    store(w, i.r[0], product, mask);
    for (int n = 0; n < 2; ++n) { store(w, i.r[3 + n], factors[n], mask); }
}

template <typename F>
struct Negated {
    template <typename A, typename B> bool operator()(A a, B b) const { return !F{}(a, b); }
};
template <typename F, typename To>
struct As16 {
    bool operator()(uint32_t a, uint32_t b) const { return F{}(To(a), To(b)); }
};

template <template <typename> class Use>
Handler by_comparison(std::string_view op) {
    if (op == "eq") { return Use<Equal>::get(); }
    if (op == "ne") { return Use<Unequal>::get(); }
    if (op == "lt" || op == "lo") { return Use<Less>::get(); }
    if (op == "le" || op == "ls") { return Use<LessEqual>::get(); }
    if (op == "gt" || op == "hi") { return Use<Greater>::get(); }
    if (op == "ge" || op == "hs") { return Use<GreaterEqual>::get(); }
    if (op == "equ") { return Use<Negated<AndNotNan>>::get(); }  // equal or unordered
    if (op == "neu") { return Use<Unequal>::get(); }             // C++'s is unordered's too
    if (op == "ltu") { return Use<Negated<GreaterEqual>>::get(); }
    if (op == "leu") { return Use<Negated<Greater>>::get(); }
    if (op == "gtu") { return Use<Negated<LessEqual>>::get(); }
    if (op == "geu") { return Use<Negated<Less>>::get(); }
    if (op == "num") { return Use<Ordered>::get(); }
    if (op == "nan") { return Use<Negated<Ordered>>::get(); }
    return nullptr;
}
template <typename T>
struct Setp {
    template <typename F> struct Use { static Handler get() { return compare<T, F>; } };
};
template <typename To>
struct Setp16 {
    template <typename F> struct Use { static Handler get() { return compare<uint32_t, As16<F, To>>; } };
};
template <typename T>
struct Set {
    template <typename F> struct Use { static Handler get() { return compare_to_mask<T, F>; } };
};
template <typename F>
struct SetHalves {
    static Handler get() { return binary<uint32_t, uint32_t, uint32_t, HalvesCompare<F>>; }
};

Handler setp(std::string_view op, Type t) {
    if (op == "ne" && is_float(t)) { return compare<float, AndNotNan>; }  // false where unordered
    switch (t) {
        case Type::u16: return by_comparison<Setp16<uint16_t>::Use>(op);
        case Type::b16: return by_comparison<Setp16<uint16_t>::Use>(op);
        case Type::s16: return by_comparison<Setp16<int16_t>::Use>(op);
        case Type::u32: case Type::b32: return by_comparison<Setp<uint32_t>::Use>(op);
        case Type::s32: return by_comparison<Setp<int32_t>::Use>(op);
        case Type::u64: case Type::b64: return by_comparison<Setp<uint64_t>::Use>(op);
        case Type::s64: return by_comparison<Setp<int64_t>::Use>(op);
        case Type::f32: return by_comparison<Setp<float>::Use>(op);
        case Type::f64: return op == "ne" ? nullptr : by_comparison<Setp<double>::Use>(op);
        default: return nullptr;
    }
}

template <typename F>
Handler integer2(Type t, int signs = 0) {
    switch (t) {
        case Type::u32: case Type::b32: return binary<uint32_t, uint32_t, uint32_t, F>;
        case Type::s32: return signs ? Handler(binary<int32_t, int32_t, int32_t, F>) : Handler(binary<uint32_t, uint32_t, uint32_t, F>);
        case Type::u64: case Type::b64: return binary<uint64_t, uint64_t, uint64_t, F>;
        case Type::s64: return signs ? Handler(binary<int64_t, int64_t, int64_t, F>) : Handler(binary<uint64_t, uint64_t, uint64_t, F>);
        default: return nullptr;
    }
}

}  // namespace

// ---- text to instructions ----

class Decoder {
public:
    Decoder(Module &module, Code &code) : module_(module), code_(code) { scopes_.emplace_back(); }

    void entry(const Module::Function &function) {
        uint64_t offset = 0;
        for (const auto &[param, size, align] : parameters(function.head)) {
            offset = (offset + align - 1) / align * align;
            const uint32_t at = allocate(8);
            code_.symbols.push_back({Symbol::Param, at, offset});
            scopes_.back().names[param] = {at, Type::u64, true};
            code_.param_offsets.push_back(uint32_t(offset));
            code_.param_sizes.push_back(uint32_t(size));
            offset += size;
        }
        body(function);
        emit_end();
        fuse();
        for (const auto &[at, label, line] : jumps_) {
            const auto found = labels_.find(label);
            if (found == labels_.end()) { throw Fault("no label " + label + " for line " + std::to_string(line)); }
            code_.insts[at].target = found->second;
            code_.insts[found->second].joins = true;
        }
        code_.register_bytes = registers_;
        code_.local_bytes = (local_ + 15) / 16 * 16;
    }

private:
    struct Name {
        uint32_t at;
        Type type;
        bool is_symbol = false;
    };
    struct Scope {
        std::unordered_map<std::string, Name> names;
    };
    struct Jump {
        size_t at;
        std::string label;
        uint32_t line;
    };
    struct Sum {
        size_t at;
        bool plus;
    };
    struct Parameter {
        std::string name;
        uint64_t size, align;
    };

    // As ptxas does: a product and a sum of which neither names a rounding become one operation, which rounds once. It leaves none
    // out in the kernels that give rows their bits: tests/integration/test_real_fusing.py counts them in machine code.
    void fuse() {
        std::unordered_map<uint32_t, size_t> products;
        for (const size_t at : products_) {
            if (const uint32_t result = code_.insts[at].r[0]; definitions_[result] == 1) { products[result] = at; }
        }
        for (const auto &[at, plus] : sums_) {
            Inst &sum = code_.insts[at];
            const bool left = products.count(sum.r[1]), right = products.count(sum.r[2]);
            if (!left && !right) { continue; }
            if (left && right) { throw Fault("a sum of two products; which of them ptxas fuses is not known"); }
            Inst &product = code_.insts[products[sum.r[left ? 1 : 2]]];
            if (product.run != keep_factors) { product.run = keep_factors, product.r[3] = allocate(4), product.r[4] = allocate(4); }
            sum.run = plus ? ternary<float, float, float, Fma> : left ? ternary<float, float, float, FmaLess> : ternary<float, float, float, LessFma>;
            sum.r[3] = sum.r[left ? 2 : 1], sum.r[1] = product.r[3], sum.r[2] = product.r[4];
        }
    }

    uint32_t allocate(int width) {
        const uint32_t at = registers_;
        registers_ += width == 1 ? 8 : uint32_t(width) * kLanes;
        return at;
    }

    static std::vector<std::string> words(std::string_view text, std::string_view separators) {
        std::vector<std::string> found;
        std::string word;
        for (const char c : text) {
            if (separators.find(c) != std::string_view::npos) {
                if (!word.empty()) { found.push_back(std::move(word)), word.clear(); }
            } else {
                word += c;
            }
        }
        if (!word.empty()) { found.push_back(std::move(word)); }
        return found;
    }

    // ".param .align 8 .b8 NAME[464]" and ".param .b64 NAME"
    static Parameter parameter(std::string_view text) {
        uint64_t align = 0, size = 0;
        std::string name;
        const auto parts = words(text, " \t\n,");
        for (size_t n = 0; n < parts.size(); ++n) {
            const std::string &word = parts[n];
            if (word == ".align") {
                align = std::stoull(parts.at(++n));
            } else if (word[0] == '.') {
                if (const auto t = type_named(std::string_view(word).substr(1))) { size = bytes(*t); }
            } else {
                name = word;
            }
        }
        align = align ? align : size;
        if (const auto bracket = name.find('['); bracket != std::string::npos) {
            const std::string extent = name.substr(bracket + 1);
            size *= extent[0] == ']' ? 0 : std::stoull(extent);
            name.resize(bracket);
        }
        return {name, size, align};
    }

    static std::vector<Parameter> parameters(std::string_view head) {
        std::vector<Parameter> found;
        const auto open = head.rfind('('), close = head.rfind(')');
        if (open == std::string_view::npos || close < open) { return found; }
        for (const std::string &part : words(head.substr(open + 1, close - open - 1), ",")) {
            if (part.find(".param") != std::string::npos) { found.push_back(parameter(part)); }
        }
        return found;
    }

    void body(const Module::Function &function) {
        const std::string_view text = function.body;
        uint32_t line = function.line;
        std::string statement;
        uint32_t begun = line;
        int depth = 0;
        const size_t scopes_before = scopes_.size();
        for (size_t n = 0; n < text.size(); ++n) {
            const char c = text[n];
            if (c == '\n') { ++line; }
            if (c == '/' && n + 1 < text.size() && text[n + 1] == '/') {
                while (n < text.size() && text[n] != '\n') { ++n; }
                ++line;
                continue;
            }
            if (c == '/' && n + 1 < text.size() && text[n + 1] == '*') {
                const size_t end = text.find("*/", n);
                line += uint32_t(std::count(text.begin() + n, text.begin() + end, '\n'));
                n = end + 1;
                continue;
            }
            const bool blank = statement.find_first_not_of(" \t\n\r") == std::string::npos;
            if (blank && c == '{') {  // a scope; within a statement a brace is a vector
                scopes_.emplace_back();
                continue;
            }
            if (blank && c == '}') {
                scopes_.pop_back();
                continue;
            }
            if (c == '(') { ++depth; }
            if (c == ')') { --depth; }
            if (c == ';') {
                statement_at(statement, begun);
                statement.clear();
                continue;
            }
            if (c == ':' && depth == 0 && is_label(statement)) {
                labels_[prefix_ + trimmed(statement)] = uint32_t(code_.insts.size());
                join_next_ = true;
                statement.clear();
                continue;
            }
            if (blank && std::isspace(c)) { continue; }
            if (blank) { begun = line, statement.clear(); }
            statement += c == '\n' || c == '\t' ? ' ' : c;
        }
        while (scopes_.size() > scopes_before) { scopes_.pop_back(); }
    }

    static std::string trimmed(std::string_view s) {
        const auto a = s.find_first_not_of(" \t\n\r"), b = s.find_last_not_of(" \t\n\r");
        return a == std::string_view::npos ? "" : std::string(s.substr(a, b - a + 1));
    }

    static bool is_label(std::string_view s) {
        const std::string t = trimmed(s);
        return !t.empty() && t.find_first_of(" .,[{%") == std::string::npos;
    }

    const Name *find(const std::string &name) const {
        for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
            const auto found = scope->names.find(name);
            if (found != scope->names.end()) { return &found->second; }
        }
        return nullptr;
    }

    Inst &emit(uint32_t line) {
        Inst &inst = code_.insts.emplace_back();
        inst.line = line;
        inst.joins = join_next_;
        join_next_ = false;
        return inst;
    }

    void emit_end() { emit(0).flow = Flow::Exit; }

    void declare(const std::string &statement) {
        if (statement.rfind(".reg", 0) == 0) {
            const auto parts = words(std::string_view(statement).substr(4), " \t,");
            const Type t = type_named(std::string_view(parts.at(0)).substr(1)).value();
            const int width = t == Type::pred ? 1 : std::max(4, bytes(t));
            for (size_t n = 1; n < parts.size(); ++n) {
                const auto angle = parts[n].find('<');
                if (angle == std::string::npos) {
                    scopes_.back().names[parts[n]] = {allocate(width), t};
                    continue;
                }
                const std::string stem = parts[n].substr(0, angle);
                const int count = std::stoi(parts[n].substr(angle + 1));
                for (int k = 0; k < count; ++k) { scopes_.back().names[stem + std::to_string(k)] = {allocate(width), t}; }
            }
        } else if (statement.rfind(".local", 0) == 0 || statement.rfind(".param", 0) == 0) {
            const Parameter p = parameter(std::string_view(statement).substr(6));
            local_ = (local_ + p.align - 1) / p.align * p.align;
            const uint32_t at = allocate(8);
            code_.symbols.push_back({Symbol::Local, at, local_});
            scopes_.back().names[p.name] = {at, Type::u64, true};
            local_ += p.size;
        } else if (statement.rfind(".shared", 0) == 0) {
            const Parameter p = parameter(std::string_view(statement).substr(7));
            add_shared(p.name, p.size, p.align);
        } else if (statement.rfind(".pragma", 0) != 0 && statement.rfind(".loc", 0) != 0) {
            throw Fault("declaration not understood: " + statement);
        }
    }

    Name add_shared(const std::string &name, uint64_t size, uint64_t align) {
        code_.shared_bytes = uint32_t((code_.shared_bytes + align - 1) / align * align);
        const uint32_t at = allocate(8);
        code_.symbols.push_back({Symbol::Shared, at, code_.shared_bytes});
        code_.shared_bytes += uint32_t(size);
        return scopes_.front().names[name] = {at, Type::u64, true};
    }

    // Names of the module: variables in global and shared memory.
    std::optional<Name> variable(const std::string &name) {
        const auto found = module_.variables_.find(name);
        if (found == module_.variables_.end()) { return std::nullopt; }
        if (found->second.shared && !found->second.dynamic) { return add_shared(name, found->second.address, 16); }
        const uint32_t at = allocate(8);
        if (found->second.dynamic) {
            code_.symbols.push_back({Symbol::Dynamic, at, 0});
        } else {
            code_.constants.push_back({at, 8, found->second.address});
        }
        return scopes_.front().names[name] = {at, Type::u64, true};
    }

    uint32_t constant(uint64_t value, int width) {
        const auto key = std::make_pair(value, width);
        const auto found = constants_.find(key);
        if (found != constants_.end()) { return found->second; }
        const uint32_t at = allocate(width);
        code_.constants.push_back({at, uint8_t(width), value});
        return constants_[key] = at;
    }

    static std::optional<uint64_t> number(const std::string &text, Type t) {
        if (text.empty()) { return std::nullopt; }
        if (text.rfind("0f", 0) == 0 || text.rfind("0F", 0) == 0) {
            const uint32_t bits = uint32_t(std::stoul(text.substr(2), nullptr, 16));
            return t == Type::f64 ? std::bit_cast<uint64_t>(double(std::bit_cast<float>(bits))) : bits;
        }
        if (text.rfind("0d", 0) == 0 || text.rfind("0D", 0) == 0) {
            const uint64_t bits = std::stoull(text.substr(2), nullptr, 16);
            return t == Type::f32 ? std::bit_cast<uint32_t>(float(std::bit_cast<double>(bits))) : bits;
        }
        const size_t first = text[0] == '-' ? 1 : 0;
        if (first == text.size() || !std::isdigit(text[first])) {
            if (text == "WARP_SZ") { return 32; }
            return std::nullopt;
        }
        const uint64_t magnitude = std::stoull(text.substr(first), nullptr, 0);
        return first ? uint64_t(-int64_t(magnitude)) : magnitude;
    }

    struct Operand {
        uint32_t at;
        Type type;
    };

    // A register, an immediate, a special register or the address of a symbol, as an operand of this type.
    Operand operand(const std::string &text, Type t) {
        if (const Name *name = find(text)) {
            if (name->is_symbol && bytes(t) == 4) { return {narrowed(name->at), Type::u32}; }
            return {name->at, name->type};
        }
        if (text[0] == '%') { return {special(text), Type::u32}; }
        if (const auto value = number(text, t)) {
            if (t == Type::pred) { return {constant(*value ? kAll : 0, 1), t}; }
            return {constant(bytes(t) == 8 ? *value : bytes(t) == 2 ? *value & 0xffff : *value & 0xffffffff, bytes(t) == 8 ? 8 : 4), t};
        }
        if (const auto name = variable(text)) {
            if (bytes(t) == 4) { return {narrowed(name->at), Type::u32}; }
            return {name->at, name->type};
        }
        throw Fault("operand not understood: " + text);
    }

    // The low word of a symbol's address (mov.u32 of a shared variable).
    uint32_t narrowed(uint32_t symbol) {
        const auto found = narrowed_.find(symbol);
        if (found != narrowed_.end()) { return found->second; }
        const uint32_t at = allocate(4);
        code_.symbols.push_back({Symbol::Global, at, symbol});
        return narrowed_[symbol] = at;
    }

    uint32_t special(const std::string &name) {
        const auto found = code_.special.find(name);
        if (found != code_.special.end()) { return found->second; }
        return code_.special[name] = allocate(name == "%clock64" || name == "%globaltimer" ? 8 : 4);
    }

    static std::vector<std::string> operands(std::string_view text) {
        std::vector<std::string> found;
        std::string word;
        int depth = 0;
        for (const char c : text) {
            if (c == '{' || c == '[' || c == '(') { ++depth; }
            if (c == '}' || c == ']' || c == ')') { --depth; }
            if (c == ',' && depth == 0) {
                found.push_back(trimmed(word)), word.clear();
            } else {
                word += c;
            }
        }
        if (!trimmed(word).empty()) { found.push_back(trimmed(word)); }
        return found;
    }

    static std::vector<std::string> vector(const std::string &text) {
        return text[0] == '{' ? words(std::string_view(text).substr(1, text.size() - 2), ", ") : std::vector<std::string>{text};
    }

    // "[%rd1+16]": base into r[0], offset apart.
    void address(Inst &inst, const std::string &text) {
        std::string inner = trimmed(std::string_view(text).substr(1, text.size() - 2));
        int64_t offset = 0;
        if (const auto plus = inner.find('+'); plus != std::string::npos) {
            offset = std::stoll(inner.substr(plus + 1), nullptr, 0);
            inner = trimmed(std::string_view(inner).substr(0, plus));
        }
        const Operand base = operand(inner, Type::u64);
        inst.r[0] = base.at;
        inst.wide = bytes(base.type) == 8;
        inst.offset = offset;
    }

    void statement_at(const std::string &raw, uint32_t line) {
        std::string text = trimmed(raw);
        if (text.empty()) { return; }
        if (text[0] == '.') { return declare(text); }
        int32_t guard = -1;
        bool negated = false;
        if (text[0] == '@') {
            const auto space = text.find(' ');
            std::string name = text.substr(1, space - 1);
            if (name[0] == '!') { negated = true, name.erase(0, 1); }
            guard = int32_t(operand(name, Type::pred).at);
            text = trimmed(std::string_view(text).substr(space));
        }
        const auto space = text.find_first_of(" \t");
        const auto op = words(text.substr(0, space), ".");
        const auto args = space == std::string::npos ? std::vector<std::string>{} : operands(std::string_view(text).substr(space));
        if (op[0] == "call") { return call(args, line, guard); }
        for (const std::string &result : args.empty() ? std::vector<std::string>{} : words(args[0], "{}, |")) {
            if (const Name *name = find(result)) { ++definitions_[name->at]; }
        }
        const size_t before = code_.insts.size();
        emit(line);
        try {
            instruction(op, args, code_.insts.back());
        } catch (const std::exception &) {
            code_.insts.back().flow = Flow::Unknown;  // an error where it is reached
            code_.insts.back().run = nullptr;
        }
        for (size_t n = before; n < code_.insts.size(); ++n) {
            Inst &inst = code_.insts[n];
            inst.guard = guard;
            inst.negated = inst.negated || (guard >= 0 && negated);
            if (inst.flow == Flow::Branch && guard >= 0) { join_next_ = true; }
        }
        if (!code_.insts.back().run && code_.insts.back().flow == Flow::Next) { code_.insts.back().flow = Flow::Unknown; }
    }

    // A call is decoded where it stands, with labels and registers of its own; its parameters are memory of the lane.
    void call(const std::vector<std::string> &args, uint32_t line, int32_t guard) {
        std::vector<std::string> plain, passed, returned;
        std::string name;
        for (const std::string &arg : args) {
            if (arg[0] == '(') {
                (name.empty() ? returned : passed) = words(std::string_view(arg).substr(1, arg.size() - 2), ", ");
            } else {
                name = arg;
            }
        }
        const auto found = module_.functions_.find(name);
        if (found == module_.functions_.end() || found->second.body.empty() || guard >= 0 || !returned.empty()) {
            emit(line).flow = Flow::Unknown;  // printf and the like
            return;
        }
        scopes_.emplace_back();
        const auto wanted = parameters(found->second.head);
        for (size_t n = 0; n < wanted.size(); ++n) {
            const Name *argument = find(passed.at(n));
            if (!argument) { throw Fault("no parameter " + passed[n]); }
            scopes_.back().names[wanted[n].name] = *argument;
        }
        const std::string outer = prefix_;
        prefix_ = "call" + std::to_string(calls_++) + ":";
        const std::string end = prefix_ + "end";
        return_label_.push_back(end);
        body(found->second);
        return_label_.pop_back();
        labels_[end] = uint32_t(code_.insts.size());
        join_next_ = true;
        prefix_ = outer;
        scopes_.pop_back();
    }

    static bool has(const std::vector<std::string> &op, std::string_view word) {
        return std::find(op.begin() + 1, op.end(), word) != op.end();
    }

    static Type last_type(const std::vector<std::string> &op) { return type_named(op.back()).value_or(Type::none); }

    void registers(Inst &inst, const std::vector<std::string> &args, std::initializer_list<Type> types) {
        size_t n = 0;
        for (const Type t : types) {
            const Operand found = operand(args.at(n), t);
            if ((bytes(found.type) == 8) != (bytes(t) == 8)) { throw Fault("a register of another width"); }
            inst.r[n++] = found.at;
        }
    }

    void instruction(const std::vector<std::string> &op, const std::vector<std::string> &args, Inst &inst);

    Module &module_;
    Code &code_;
    std::vector<Scope> scopes_;
    std::unordered_map<std::string, uint32_t> labels_;
    std::vector<Jump> jumps_;
    std::map<std::pair<uint64_t, int>, uint32_t> constants_;
    std::map<uint32_t, uint32_t> narrowed_;
    std::unordered_map<uint32_t, int> definitions_;  // of a register: instructions that write it
    std::vector<size_t> products_;                   // float multiplications that name no rounding
    std::vector<Sum> sums_;                          // likewise additions and subtractions
    std::string prefix_;
    std::vector<std::string> return_label_;
    uint32_t registers_ = 0;
    uint64_t local_ = 0;
    int calls_ = 0;
    bool join_next_ = false;
    std::vector<std::unique_ptr<uint32_t[]>> &lists_ = module_.lists_;
};

void Decoder::instruction(const std::vector<std::string> &op, const std::vector<std::string> &args, Inst &inst) {
    const std::string &name = op[0];
    const Type t = last_type(op);
    const auto two = [&](Handler h, Type d, Type a, Type b) { inst.run = h, registers(inst, args, {d, a, b}); };
    const auto one = [&](Handler h, Type d, Type a) { inst.run = h, registers(inst, args, {d, a}); };
    const bool sixteen = bytes(t) == 2;

    if (name == "bra") {
        inst.flow = Flow::Branch;
        jumps_.push_back({code_.insts.size() - 1, prefix_ + args.at(0), inst.line});
    } else if (name == "ret" && !return_label_.empty()) {
        inst.flow = Flow::Branch;
        jumps_.push_back({code_.insts.size() - 1, return_label_.back(), inst.line});
    } else if (name == "ret" || name == "exit") {
        inst.flow = Flow::Exit;
    } else if ((name == "bar" || name == "barrier") && (has(op, "sync"))) {
        inst.flow = Flow::Barrier;
        inst.offset = int64_t(number(args.at(0), Type::u32).value());
        inst.size = None;
        if (args.size() > 1) { inst.option = uint16_t(number(args[1], Type::u32).value() / kLanes); }
    } else if ((name == "bar" || name == "barrier") && has(op, "red") && (t == Type::pred || has(op, "popc")) && args.size() == 3 && args[2][0] != '!') {
        inst.flow = Flow::Barrier;
        inst.offset = int64_t(number(args.at(1), Type::u32).value());
        inst.size = has(op, "popc") ? Count : has(op, "or") ? Any : All;
        inst.r[0] = operand(args[0], t).at, inst.r[1] = operand(args[2], Type::pred).at;
    } else if (name == "bar" && op.size() > 1 && op[1] == "warp") {
        inst.run = [](Warp &, const Inst &, uint32_t) {};
    } else if (name == "membar" || name == "fence" || name == "nanosleep" || name == "prefetch" || name == "prefetchu" || name == "discard" || name == "applypriority") {
        inst.run = [](Warp &, const Inst &, uint32_t) {};
    } else if (name == "mov") {
        const auto to = vector(args.at(0)), from = vector(args.at(1));
        if (args[0][0] == '{' || args[1][0] == '{') {
            const bool packs = args[1][0] == '{';
            const auto &many = packs ? from : to;
            const Operand whole = operand(packs ? args[0] : args[1], t);
            inst.run = packs ? pack : unpack;
            inst.r[0] = whole.at, inst.wide = bytes(t) == 8;
            inst.count = uint8_t(many.size()), inst.size = uint8_t(bytes(t) / many.size());
            for (size_t n = 0; n < many.size(); ++n) { inst.r[1 + n] = many[n] == "_" ? allocate(4) : operand(many[n], inst.size == 2 ? Type::b16 : Type::b32).at; }
        } else if (t == Type::pred) {
            registers(inst, args, {t, t}), inst.r[2] = inst.r[1], inst.count = 0;
            inst.run = predicate<And>;
        } else if (bytes(t) == 8) {
            one(unary<uint64_t, uint64_t, Same>, t, t);
        } else {
            one(unary<uint32_t, uint32_t, Same>, t, t);
        }
    } else if (name == "cvta") {
        const bool shared = has(op, "shared"), to = has(op, "to");
        registers(inst, args, {Type::u64, Type::u64});
        inst.run = unary<uint64_t, uint64_t, Same>;
        if (shared) {
            inst.run = to ? Handler([](Warp &w, const Inst &i, uint32_t m) {
                uint64_t out[kLanes];
                for (int l = 0; l < kLanes; ++l) { out[l] = w.lanes<uint64_t>(i.r[1])[l] - reinterpret_cast<uint64_t>(w.block->shared.data()); }
                store(w, i.r[0], out, m);
            }) : Handler([](Warp &w, const Inst &i, uint32_t m) {
                uint64_t out[kLanes];
                for (int l = 0; l < kLanes; ++l) { out[l] = w.lanes<uint64_t>(i.r[1])[l] + reinterpret_cast<uint64_t>(w.block->shared.data()); }
                store(w, i.r[0], out, m);
            });
        }
    } else if (name == "ld" || name == "ldu" || name == "st") {
        const bool stores = name == "st";
        address(inst, args.at(stores ? 0 : 1));
        const auto many = vector(args.at(stores ? 1 : 0));
        inst.space = has(op, "shared") || has(op, "shared::cta") ? Shared : Generic;
        inst.size = uint8_t(bytes(t)), inst.count = uint8_t(many.size()), inst.is_signed = is_signed(t);
        for (size_t n = 0; n < many.size(); ++n) {
            const Operand value = operand(many[n], t);
            inst.r[1 + n] = value.at;
            if (bytes(value.type) == 8) { inst.option |= uint16_t(1u << n); }
        }
        inst.run = stores ? save : load;
    } else if (name == "atom" || name == "red") {
        const bool returns = name == "atom";
        const size_t first = returns ? 1 : 0;
        address(inst, args.at(first));
        inst.space = has(op, "shared") ? Shared : Generic;
        inst.count = returns;
        if (returns) { inst.r[1] = operand(args[0], t).at; }
        inst.r[2] = operand(args.at(first + 1), t).at;
        inst.r[3] = args.size() > first + 2 ? operand(args[first + 2], t).at : inst.r[2];
        const bool real = t == Type::f32, negative = t == Type::s32;
        if (bytes(t) == 8) {
            inst.run = has(op, "add") ? atomic<uint64_t, TakeAdd> : has(op, "exch") ? atomic<uint64_t, Exchange> : has(op, "cas") ? atomic<uint64_t, CompareSwap> : nullptr;
        } else if (has(op, "add")) {
            inst.run = real ? atomic<float, TakeAdd> : atomic<uint32_t, TakeAdd>;
        } else if (has(op, "max")) {
            inst.run = negative ? atomic<int32_t, TakeMax> : atomic<uint32_t, TakeMax>;
        } else if (has(op, "min")) {
            inst.run = negative ? atomic<int32_t, TakeMin> : atomic<uint32_t, TakeMin>;
        } else if (has(op, "or")) {
            inst.run = atomic<uint32_t, TakeOr>;
        } else if (has(op, "and")) {
            inst.run = atomic<uint32_t, TakeAnd>;
        } else if (has(op, "exch")) {
            inst.run = atomic<uint32_t, Exchange>;
        } else if (has(op, "cas")) {
            inst.run = atomic<uint32_t, CompareSwap>;
        }
    } else if (name == "cp" && has(op, "commit_group")) {
        inst.run = commit_group;
    } else if (name == "cp" && (has(op, "wait_group") || has(op, "wait_all"))) {
        inst.run = wait_group;
        inst.option = has(op, "wait_all");
        inst.offset = args.empty() ? 0 : int64_t(number(args[0], Type::u32).value());
    } else if (name == "cp" && has(op, "async") && !has(op, "bulk")) {
        const auto inside = [&](const std::string &text) { return operand(trimmed(std::string_view(text).substr(1, text.size() - 2)), Type::u64); };
        const Operand to = inside(args.at(0)), from = inside(args.at(1));
        inst.wide = bytes(to.type) == 8;
        inst.r[0] = to.at, inst.r[1] = from.at;
        inst.r[2] = operand(args.at(2), Type::u32).at;
        inst.r[3] = args.size() > 3 ? operand(args[3], Type::u32).at : inst.r[2];
        inst.run = copy_async;
    } else if (name == "ldmatrix") {
        address(inst, args.at(1));
        const auto many = vector(args[0]);
        for (size_t n = 0; n < many.size(); ++n) { inst.r[1 + n] = operand(many[n], Type::b32).at; }
        const bool trans = has(op, "trans");
        inst.run = many.size() == 4 ? (trans ? load_matrix<4, true> : load_matrix<4, false>)
                 : many.size() == 2 ? (trans ? load_matrix<2, true> : load_matrix<2, false>)
                                    : (trans ? load_matrix<1, true> : load_matrix<1, false>);
    } else if (name == "mma" && (has(op, "m16n8k16") || has(op, "m16n8k8"))) {
        const int depth = has(op, "m16n8k8") ? 8 : 16;
        auto list = std::make_unique<uint32_t[]>(6);
        const auto d = vector(args.at(0)), a = vector(args.at(1)), b = vector(args.at(2)), c = vector(args.at(3));
        for (int n = 0; n < 4; ++n) {
            inst.r[n] = operand(d.at(n), Type::f32).at;
            if (n < depth / 4) { inst.r[4 + n] = operand(a.at(n), Type::b32).at; }
            list[2 + n] = operand(c.at(n), Type::f32).at;
        }
        for (int n = 0; n < depth / 8; ++n) { list[n] = operand(b.at(n), Type::b32).at; }
        inst.offset = int64_t(reinterpret_cast<intptr_t>(list.get()));
        lists_.push_back(std::move(list));
        const std::string types = op[op.size() - 4] + op[op.size() - 3] + op[op.size() - 2] + op[op.size() - 1];
        inst.run = types == "f32f16f16f32" ? (depth == 8 ? mma<Fp16, 8> : mma<Fp16, 16>) : types == "f32bf16bf16f32" ? (depth == 8 ? mma<Bf16, 8> : mma<Bf16, 16>) : nullptr;
    } else if (name == "shfl") {
        const auto to = words(args.at(0), "|");
        inst.r[0] = operand(to[0], Type::b32).at;
        for (int n = 1; n < 5; ++n) { inst.r[n] = operand(args.at(n), Type::b32).at; }
        inst.count = uint8_t(to.size());
        if (to.size() == 2) { inst.r[5] = operand(to[1], Type::pred).at; }
        inst.run = has(op, "bfly") ? shuffle<0> : has(op, "up") ? shuffle<1> : has(op, "down") ? shuffle<2> : shuffle<3>;
    } else if (name == "vote") {
        const bool ballot = has(op, "ballot");
        inst.r[0] = operand(args.at(0), ballot ? Type::b32 : Type::pred).at;
        std::string p = args.at(1);
        if (p[0] == '!') { inst.count = 1, p.erase(0, 1); } else { inst.count = 0; }
        inst.r[1] = operand(p, Type::pred).at;
        inst.r[2] = operand(args.at(2), Type::b32).at;
        inst.run = ballot ? vote<2> : has(op, "any") ? vote<0> : has(op, "all") ? vote<1> : nullptr;
    } else if (name == "setp") {
        // setp.OP[.BOOL][.ftz].TYPE p[|q], a, b[, [!]c]
        const auto to = words(args.at(0), "|");
        inst.r[0] = operand(to[0], Type::pred).at;
        inst.count = uint8_t(to.size());
        if (to.size() == 2) { inst.r[4] = operand(to[1], Type::pred).at; }
        inst.r[1] = operand(args.at(1), t).at, inst.r[2] = operand(args.at(2), t).at;
        if (args.size() > 3) {
            if (args[3][0] == '!') { throw Fault("negated operand of setp"); }
            inst.r[3] = operand(args[3], Type::pred).at;
            inst.option = has(op, "and") ? 1 : has(op, "or") ? 2 : 3;
        }
        inst.run = setp(op.at(1), t);
    } else if (name == "set") {
        inst.r[0] = operand(args.at(0), Type::u32).at, inst.r[1] = operand(args.at(1), t).at, inst.r[2] = operand(args.at(2), t).at;
        if (args.size() > 3 || op.at(op.size() - 2) == "f32") { throw Fault("set"); }
        inst.run = t == Type::f16x2 ? by_comparison<SetHalves>(op.at(1))
                 : t == Type::f32   ? by_comparison<Set<float>::Use>(op.at(1))
                 : t == Type::s32   ? by_comparison<Set<int32_t>::Use>(op.at(1))
                 : t == Type::u32   ? by_comparison<Set<uint32_t>::Use>(op.at(1)) : nullptr;
    } else if (name == "selp") {
        inst.run = bytes(t) == 8 ? select<uint64_t> : select<uint32_t>;
        registers(inst, args, {t, t, t, Type::pred});
    } else if (t == Type::pred && (name == "and" || name == "or" || name == "xor" || name == "not")) {
        inst.count = 0;
        inst.r[0] = operand(args.at(0), t).at;
        for (int n = 1; n <= 2; ++n) {
            std::string a = args.at(name == "not" ? 1 : n);
            if (a[0] == '!') { inst.count |= uint8_t(n), a.erase(0, 1); }
            inst.r[n] = operand(a, t).at;
        }
        if (name == "not") { inst.count ^= 3; }
        inst.run = name == "or" ? predicate<Or> : name == "xor" ? predicate<Xor> : predicate<And>;
    } else if (name == "and" || name == "or" || name == "xor") {
        two(name == "and" ? (bytes(t) == 8 ? binary<uint64_t, uint64_t, uint64_t, And> : binary<uint32_t, uint32_t, uint32_t, And>)
            : name == "or" ? (bytes(t) == 8 ? binary<uint64_t, uint64_t, uint64_t, Or> : binary<uint32_t, uint32_t, uint32_t, Or>)
                           : (bytes(t) == 8 ? binary<uint64_t, uint64_t, uint64_t, Xor> : binary<uint32_t, uint32_t, uint32_t, Xor>), t, t, t);
    } else if (name == "not") {
        one(bytes(t) == 8 ? unary<uint64_t, uint64_t, Not> : unary<uint32_t, uint32_t, Not>, t, t);
    } else if (name == "shl") {
        two(sixteen ? binary<uint32_t, uint32_t, uint32_t, Left16> : bytes(t) == 8 ? binary<uint64_t, uint64_t, uint32_t, Left> : binary<uint32_t, uint32_t, uint32_t, Left>, t, t, Type::u32);
    } else if (name == "shr") {
        two(t == Type::s16 ? binary<uint32_t, uint32_t, uint32_t, RightSigned16> : sixteen ? binary<uint32_t, uint32_t, uint32_t, Right16>
            : t == Type::s64 ? binary<int64_t, int64_t, uint32_t, Right> : bytes(t) == 8 ? binary<uint64_t, uint64_t, uint32_t, Right>
            : t == Type::s32 ? binary<int32_t, int32_t, uint32_t, Right> : binary<uint32_t, uint32_t, uint32_t, Right>, t, t, Type::u32);
    } else if (name == "shf") {
        inst.run = has(op, "l") ? ternary<uint32_t, uint32_t, uint32_t, FunnelLeft> : ternary<uint32_t, uint32_t, uint32_t, FunnelRight>;
        if (!has(op, "wrap")) { throw Fault("shf.clamp"); }
        registers(inst, args, {t, t, t, Type::u32});
    } else if (name == "bfe" && t == Type::u32) {
        inst.run = ternary<uint32_t, uint32_t, uint32_t, FieldU>;
        registers(inst, args, {t, t, Type::u32, Type::u32});
    } else if (name == "bfi" && bytes(t) == 4) {
        inst.run = insert_field;
        registers(inst, args, {t, t, t, Type::u32, Type::u32});
    } else if (name == "prmt" && op.size() == 2) {
        inst.run = permute;
        registers(inst, args, {t, t, t, t});
    } else if (name == "lop3") {
        inst.run = lookup3;
        registers(inst, args, {t, t, t, t, t});
    } else if (name == "popc" && bytes(t) == 4) {
        one(unary<uint32_t, uint32_t, Popc>, Type::u32, t);
    } else if (name == "clz" && bytes(t) == 4) {
        one(unary<uint32_t, uint32_t, Clz>, Type::u32, t);
    } else if (name == "cvt" && (op.at(op.size() - 2) == "f16x2" || op.at(op.size() - 2) == "bf16x2")) {
        if (t != Type::f32 || !has(op, "rn")) { throw Fault("cvt"); }
        const bool half = op.at(op.size() - 2) == "f16x2", relu = has(op, "relu");
        two(half ? (relu ? binary<uint32_t, float, float, Pack2<false, true>> : binary<uint32_t, float, float, Pack2<false>>)
                 : (relu ? binary<uint32_t, float, float, Pack2<true, true>> : binary<uint32_t, float, float, Pack2<true>>), Type::b32, t, t);
    } else if (name == "cvt") {
        const Type to = type_named(op.at(op.size() - 2)).value();
        if (has(op, "sat") || bytes(to) == 1) { throw Fault("cvt"); }
        inst.count = has(op, "rzi") || has(op, "rz") ? ToZero : has(op, "rmi") ? Down : has(op, "rpi") ? Up : Nearest;
        if (has(op, "rz") || has(op, "rm") || has(op, "rp")) { throw Fault("cvt"); }
        if (is_float(to) && is_float(t) && (has(op, "rzi") || has(op, "rmi") || has(op, "rpi") || has(op, "rni"))) { throw Fault("cvt"); }
        inst.option = uint16_t(int(to) << 8 | int(t));
        const Operand target = operand(args.at(0), to), source = operand(args.at(1), t);
        inst.r[0] = target.at, inst.r[1] = source.at;
        inst.size = uint8_t(bytes(target.type)), inst.wide = bytes(source.type) == 8;
        inst.run = convert;
    } else if (name == "mul" || name == "mad") {
        const bool adds = name == "mad";
        if (t == Type::f32 && !adds) {
            two(binary<float, float, float, Mul>, t, t, t);
            if (!has(op, "rn")) { products_.push_back(code_.insts.size() - 1); }
        } else if (t == Type::f32) {
            inst.run = ternary<float, float, float, Fma>, registers(inst, args, {t, t, t, t});
        } else if (t == Type::f16x2 || t == Type::bf16x2) {
            two(t == Type::f16x2 ? binary<uint32_t, uint32_t, uint32_t, Halves<Mul, false>> : binary<uint32_t, uint32_t, uint32_t, Halves<Mul, true>>, t, t, t);
        } else if (t == Type::f64) {
            two(binary<double, double, double, Mul>, t, t, t);
        } else if (has(op, "wide")) {
            const Type d = sixteen ? Type::u32 : Type::u64;
            if (adds) {
                inst.run = is_signed(t) ? ternary<uint64_t, int32_t, uint64_t, WideAddS> : ternary<uint64_t, uint32_t, uint64_t, WideAddU>;
                if (sixteen) { throw Fault("mad.wide"); }
                registers(inst, args, {d, t, t, d});
            } else {
                two(t == Type::u16 ? binary<uint32_t, uint32_t, uint32_t, WideU16> : t == Type::s16 ? binary<uint32_t, uint32_t, uint32_t, WideS16>
                    : t == Type::s32 ? binary<uint64_t, int32_t, int32_t, WideS> : binary<uint64_t, uint32_t, uint32_t, WideU>, d, t, t);
            }
        } else if (has(op, "hi")) {
            if (adds) { throw Fault("mad.hi"); }
            two(t == Type::s32 ? binary<int32_t, int32_t, int32_t, HighS> : t == Type::u64 ? binary<uint64_t, uint64_t, uint64_t, HighU64> : binary<uint32_t, uint32_t, uint32_t, HighU>, t, t, t);
        } else if (adds) {
            inst.run = bytes(t) == 8 ? ternary<uint64_t, uint64_t, uint64_t, MulAdd> : ternary<uint32_t, uint32_t, uint32_t, MulAdd>;
            registers(inst, args, {t, t, t, t});
        } else {
            two(sixteen ? binary<uint32_t, uint32_t, uint32_t, Mul16> : integer2<Mul>(t), t, t, t);
        }
    } else if (name == "fma") {
        inst.run = t == Type::f32 ? ternary<float, float, float, Fma> : t == Type::f64 ? ternary<double, double, double, Fma>
                 : t == Type::f16x2 ? ternary<uint32_t, uint32_t, uint32_t, Halves<Fma, false>> : t == Type::bf16x2 ? ternary<uint32_t, uint32_t, uint32_t, Halves<Fma, true>> : nullptr;
        registers(inst, args, {t, t, t, t});
    } else if (name == "add" || name == "sub") {
        const bool plus = name == "add";
        if (has(op, "cc")) { throw Fault("carry"); }
        if (t == Type::f32) {
            two(plus ? binary<float, float, float, Add> : binary<float, float, float, Sub>, t, t, t);
            if (!has(op, "rn")) { sums_.push_back({code_.insts.size() - 1, plus}); }
        } else if (t == Type::f64) {
            two(plus ? binary<double, double, double, Add> : binary<double, double, double, Sub>, t, t, t);
        } else if (t == Type::f16x2 || t == Type::bf16x2) {
            if (!plus) { throw Fault("sub"); }
            two(t == Type::f16x2 ? binary<uint32_t, uint32_t, uint32_t, Halves<Add, false>> : binary<uint32_t, uint32_t, uint32_t, Halves<Add, true>>, t, t, t);
        } else {
            two(sixteen ? (plus ? binary<uint32_t, uint32_t, uint32_t, Add16> : binary<uint32_t, uint32_t, uint32_t, Sub16>) : plus ? integer2<Add>(t) : integer2<Sub>(t), t, t, t);
        }
    } else if (name == "min" || name == "max") {
        const bool least = name == "min";
        const bool or_nan = has(op, "NaN"), halves = t == Type::f16x2, bfloats = t == Type::bf16x2;
        if (has(op, "xorsign") || t == Type::f16 || t == Type::bf16 || (or_nan && !halves && !bfloats && t != Type::f32)) { throw Fault("max.xorsign"); }
        const auto of_halves = [&]<bool Bfloat>() {
            using Run = decltype(&binary<uint32_t, uint32_t, uint32_t, Halves<MinOrNaN, Bfloat>>);
            return least ? (or_nan ? Run(binary<uint32_t, uint32_t, uint32_t, Halves<MinOrNaN, Bfloat>>) : binary<uint32_t, uint32_t, uint32_t, Halves<MinReal, Bfloat>>)
                         : (or_nan ? Run(binary<uint32_t, uint32_t, uint32_t, Halves<MaxOrNaN, Bfloat>>) : binary<uint32_t, uint32_t, uint32_t, Halves<MaxReal, Bfloat>>);
        };
        two(halves    ? of_halves.template operator()<false>()
            : bfloats ? of_halves.template operator()<true>()
            : or_nan ? (least ? binary<float, float, float, MinOrNaN> : binary<float, float, float, MaxOrNaN>)
            : t == Type::f32 ? (least ? binary<float, float, float, MinReal> : binary<float, float, float, MaxReal>)
                             : least ? integer2<Min>(t, 1) : integer2<Max>(t, 1), t, t, t);
    } else if (name == "div") {
        two(t == Type::f32 ? binary<float, float, float, DivideReal> : t == Type::f64 ? binary<double, double, double, DivideReal> : integer2<Divide>(t, 1), t, t, t);
    } else if (name == "rem") {
        two(integer2<Remainder>(t, 1), t, t, t);
    } else if (name == "neg") {
        one(t == Type::f32 ? unary<float, float, NegateReal> : t == Type::f64 ? unary<double, double, NegateReal>
            : t == Type::f16 || t == Type::bf16 ? unary<uint32_t, uint32_t, NegateHalf>
            : t == Type::f16x2 || t == Type::bf16x2 ? unary<uint32_t, uint32_t, NegateHalves> : bytes(t) == 8 ? unary<uint64_t, uint64_t, Negate> : unary<uint32_t, uint32_t, Negate>, t, t);
    } else if (name == "abs") {
        one(t == Type::f32 ? unary<float, float, Abs> : t == Type::s32 ? unary<int32_t, int32_t, Abs>
            : t == Type::f16x2 || t == Type::bf16x2 ? unary<uint32_t, uint32_t, AbsHalves> : nullptr, t, t);
    } else if (t == Type::f32) {
        one(name == "ex2" ? unary<float, float, Exp2> : name == "lg2" ? unary<float, float, Log2> : name == "rcp" ? unary<float, float, Reciprocal>
            : name == "sqrt" ? unary<float, float, Sqrt> : name == "rsqrt" ? unary<float, float, Rsqrt> : name == "tanh" ? unary<float, float, Tanh>
            : name == "sin" ? unary<float, float, Sin> : name == "cos" ? unary<float, float, Cos> : nullptr, t, t);
    }
}

// ---- modules ----

Module::Module(std::string text) : text_(std::move(text)) {
    const std::string_view all = text_;
    uint32_t line = 1;
    size_t at = 0;
    const auto starts = [&](size_t n, std::string_view what) { return all.compare(n, what.size(), what) == 0; };
    const auto name_in = [](std::string_view head) {
        // the last word before the parameters, or before an array's extent
        const auto open = head.rfind('(');
        std::string_view part = open == std::string_view::npos ? head : head.substr(0, open);
        if (const auto bracket = part.find('['); bracket != std::string_view::npos) { part = part.substr(0, bracket); }
        const auto last = part.find_last_not_of(" \t\n");
        const auto first = part.find_last_of(" \t\n", last);
        return std::string(part.substr(first + 1, last - first));
    };
    while (at < all.size()) {
        const size_t end_of_line = std::min(all.find('\n', at), all.size());
        const size_t first = all.find_first_not_of(" \t", at);
        const bool declares = first < end_of_line && (starts(first, ".visible .entry") || starts(first, ".entry") || starts(first, ".weak .entry") || starts(first, ".func") ||
                                                      starts(first, ".visible .func") || starts(first, ".weak .func") || starts(first, ".extern .func"));
        const bool variable = first < end_of_line && !declares && (starts(first, ".global") || starts(first, ".visible .global") || starts(first, ".extern .shared") || starts(first, ".shared") ||
                                                                   starts(first, ".const") || starts(first, ".visible .const") || starts(first, ".weak .global"));
        if (declares) {
            const size_t brace = all.find('{', first), semicolon = all.find(';', first);
            const size_t head_end = std::min(brace, semicolon);
            std::string_view head = all.substr(first, head_end - first);
            // ".maxntid" and the like stand between the parameters and the body
            const auto close = head.find(')', head.find('('));
            const bool returns = starts(first, ".func (") || head.find(".func  (") != std::string_view::npos;
            const std::string name = name_in(returns ? head : head.substr(0, close + 1));
            const uint32_t body_line = line + uint32_t(std::count(all.begin() + at, all.begin() + head_end, '\n'));
            size_t next = head_end + 1;
            std::string_view body;
            if (brace < semicolon) {
                int depth = 1;
                while (depth) {
                    next = all.find_first_of("{}", next);
                    depth += all[next] == '{' ? 1 : -1;
                    ++next;
                }
                body = all.substr(brace + 1, next - brace - 2);
            }
            if (!body.empty() || !functions_.count(name)) { functions_[name] = {head, body, body_line}; }
            line += uint32_t(std::count(all.begin() + at, all.begin() + next, '\n'));
            at = next;
            continue;
        }
        if (variable) {
            const size_t semicolon = all.find(';', first);
            std::string_view head = all.substr(first, semicolon - first);
            const auto equals = head.find('=');
            const std::string_view left = head.substr(0, equals);
            const std::string name = name_in(left);
            uint64_t element = 1, extent = 1;
            for (const auto &[word, size] : {std::pair{".b64", 8}, {".u64", 8}, {".b32", 4}, {".u32", 4}, {".f32", 4}, {".b16", 2}, {".u16", 2}}) {
                if (left.find(word) != std::string_view::npos) { element = uint64_t(size); }
            }
            bool open_ended = false;
            if (const auto bracket = left.find('['); bracket != std::string_view::npos) {
                open_ended = left[bracket + 1] == ']';
                if (!open_ended) { extent = std::stoull(std::string(left.substr(bracket + 1))); }
            }
            const bool shared = left.find(".shared") != std::string_view::npos;
            if (shared) {
                variables_[name] = {element * extent, true, open_ended};
            } else {
                storage_.push_back(std::make_unique<char[]>(element * extent));
                char *to = storage_.back().get();
                if (equals != std::string_view::npos) {
                    size_t n = 0;
                    const std::string values(head.substr(equals + 1));
                    for (size_t c = 0; c < values.size() && n < extent;) {
                        if (!std::isdigit(values[c]) && values[c] != '-') { ++c; continue; }
                        size_t used = 0;
                        const int64_t value = std::stoll(values.substr(c, 24), &used, 0);
                        std::memcpy(to + element * n++, &value, element);
                        c += used;
                    }
                }
                Memory::instance().add(to, element * extent);
                variables_[name] = {reinterpret_cast<uint64_t>(to), false, false};
            }
            line += uint32_t(std::count(all.begin() + at, all.begin() + semicolon, '\n'));
            at = semicolon;
            continue;
        }
        at = end_of_line + 1;
        ++line;
    }
}

const Code &Module::code(const std::string &name) {
    auto &code = decoded_[name];
    if (!code) {
        code = std::make_unique<Code>();
        code->name = name;
        Decoder(*this, *code).entry(functions_.at(name));
    }
    return *code;
}

std::string Module::line(uint32_t number) const {
    size_t at = 0;
    for (uint32_t n = 1; n < number && at != std::string::npos; ++n) { at = text_.find('\n', at) + 1; }
    return text_.substr(at, text_.find('\n', at) - at);
}

std::string Module::readable(const std::string &mangled) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status), &std::free);
    return status == 0 ? name.get() : mangled;
}

}  // namespace emulator

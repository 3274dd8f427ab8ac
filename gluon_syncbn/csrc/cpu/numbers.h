// Reads, computes and writes each type of data of the CPU's kernels, as single values and in lanes.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/bfloat16.h"
#include "cpu/half.h"
#include "types.h"

#define SYNCBN_INLINE static inline __attribute__((always_inline))
#define SYNCBN_METHOD inline __attribute__((always_inline))

// All types of data, as define(enumerator of `Type`, C++ type, ...).
#define SYNCBN_NUMBERS(define, ...)                 \
    SYNCBN_NUMBERS_IN_BLOCKS(define, ##__VA_ARGS__) \
    define(kFloat64, double, ##__VA_ARGS__) define(kFloat16, Half, ##__VA_ARGS__)
// The types that oneDNN puts into blocks of channels. The kernels compute with them in float.
#define SYNCBN_NUMBERS_IN_BLOCKS(define, ...) \
    define(kFloat32, float, ##__VA_ARGS__) define(kBfloat16, Bfloat16, ##__VA_ARGS__)

namespace syncbn {
namespace cpu {

// Eight float64 partial sums fill the widest register; two such sets hide the latency of an addition.
constexpr int kLanes = 8;

// Vectors have parts of the registers' width, because g++ keeps a vector of several registers in memory.
template <int Width>
struct Lanes {
    typedef double Part __attribute__((vector_size(Width * sizeof(double))));
    static constexpr int kParts = kLanes / Width;
    Part parts[kParts];
    SYNCBN_METHOD void clear() {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) parts[i] = Part{};
    }
    SYNCBN_METHOD void add(const Lanes& other) {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) parts[i] += other.parts[i];
    }
    SYNCBN_METHOD void add_product(const Lanes& one, const Lanes& other) {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) parts[i] += one.parts[i] * other.parts[i];
    }
    SYNCBN_METHOD void subtract(const Lanes& other) {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) parts[i] -= other.parts[i];
    }
    // Sets values to 0 where the mask is 0.
    SYNCBN_METHOD void keep(const Lanes& mask) {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) parts[i] = mask.parts[i] != 0 ? parts[i] : Part{};
    }
    SYNCBN_METHOD void subtract(double value) {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) parts[i] -= value;
    }
};
typedef float FloatLanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t BitLanes __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t ShortLanes __attribute__((vector_size(kLanes * sizeof(uint16_t))));

template <typename T>
struct Value;
template <>
struct Value<float> {
    using Compute = float;
    template <int Width>
    using Many = FloatLanes;
    SYNCBN_INLINE float load(const float* p) { return *p; }
    SYNCBN_INLINE void store(float* p, float v) { *p = v; }
};
template <>
struct Value<double> {
    using Compute = double;
    template <int Width>
    using Many = Lanes<Width>;
    SYNCBN_INLINE double load(const double* p) { return *p; }
    SYNCBN_INLINE void store(double* p, double v) { *p = v; }
};
template <>
struct Value<Half> {
    using Compute = float;
    template <int Width>
    using Many = FloatLanes;
    SYNCBN_INLINE float load(const Half* p) { return half_to_float(p->bits); }
    SYNCBN_INLINE void store(Half* p, float v) { p->bits = float_to_half(v); }
};
template <>
struct Value<Bfloat16> {
    using Compute = float;
    template <int Width>
    using Many = FloatLanes;
    SYNCBN_INLINE float load(const Bfloat16* p) { return bfloat16_to_float(p->bits); }
    SYNCBN_INLINE void store(Bfloat16* p, float v) { p->bits = float_to_bfloat16(v); }
};

template <int Width>
SYNCBN_INLINE void load_lanes(const double* p, Lanes<Width>* out) {
#pragma GCC unroll 4
    for (int i = 0; i < Lanes<Width>::kParts; ++i) std::memcpy(&out->parts[i], p + i * Width, sizeof out->parts[i]);
}
SYNCBN_INLINE void load_lanes(const float* p, FloatLanes* out) { std::memcpy(out, p, sizeof *out); }
// The bits of 16-bit values, widened.
SYNCBN_INLINE void load_bits(const void* p, BitLanes* out) {
    ShortLanes values;
    std::memcpy(&values, p, sizeof values);
    *out = __builtin_convertvector(values, BitLanes);
}
SYNCBN_INLINE void load_lanes(const Half* p, FloatLanes* out) {
    BitLanes bits;
    load_bits(p, &bits);
    const BitLanes magnitude = bits & 0x7fffu;
    const BitLanes shifted = magnitude << 13;
    FloatLanes finite;
    std::memcpy(&finite, &shifted, sizeof finite);
    finite = finite * 0x1p112f;  // as in half_to_float
    BitLanes result;
    std::memcpy(&result, &finite, sizeof result);
    result |= (reinterpret_cast<BitLanes>(magnitude >= 0x7c00u) & 0x7f800000u) | ((bits & 0x8000u) << 16);
    std::memcpy(out, &result, sizeof *out);
}
SYNCBN_INLINE void load_lanes(const Bfloat16* p, FloatLanes* out) {
    BitLanes bits;
    load_bits(p, &bits);
    bits <<= 16;
    std::memcpy(out, &bits, sizeof *out);
}

SYNCBN_INLINE void store_lanes(const FloatLanes& from, float* to) { std::memcpy(to, &from, sizeof from); }
SYNCBN_INLINE void store_lanes(const FloatLanes& from, Bfloat16* to) {
    BitLanes bits;
    std::memcpy(&bits, &from, sizeof bits);
    const BitLanes rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // as in float_to_bfloat16
    const BitLanes is_nan = reinterpret_cast<BitLanes>((bits & 0x7fffffffu) > 0x7f800000u);
    const ShortLanes values =
        __builtin_convertvector((is_nan & ((bits >> 16) | 0x40u)) | (~is_nan & rounded), ShortLanes);
    std::memcpy(to, &values, sizeof values);
}

// Calls f with a null pointer of the data's type.
#define SYNCBN_CASE(TYPE, T) \
    case Type::TYPE:         \
        return f(static_cast<T*>(nullptr));
template <typename F>
void with_type(Type type, const F& f) {
    switch (type) { SYNCBN_NUMBERS(SYNCBN_CASE) }
}
template <typename F>
void with_type_in_blocks(Type type, const F& f) {
    switch (type) {
        SYNCBN_NUMBERS_IN_BLOCKS(SYNCBN_CASE)
        default:
            break;  // no array of another type is in blocks
    }
}
#undef SYNCBN_CASE

}  // namespace cpu
}  // namespace syncbn

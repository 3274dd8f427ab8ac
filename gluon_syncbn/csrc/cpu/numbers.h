// Reads, computes and writes each type of data of the CPU's kernels.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "types.h"

#define SYNCBN_INLINE static inline __attribute__((always_inline))
#define SYNCBN_METHOD inline __attribute__((always_inline))

// All types of data, as define(enumerator of `Type`, C++ type, ...).
#define SYNCBN_NUMBERS(define, ...)                                                \
    define(kFloat32, float, ##__VA_ARGS__) define(kFloat64, double, ##__VA_ARGS__) \
        define(kFloat16, Half, ##__VA_ARGS__) define(kBfloat16, Bfloat16, ##__VA_ARGS__)

namespace syncbn::cpu {

template <typename To, typename From>
SYNCBN_INLINE void copy_bits(const From& from, To* to) {
    static_assert(sizeof *to == sizeof from, "as many bits");
    std::memcpy(to, &from, sizeof from);
}

// Types of 16 bits, which convert to binary32 and back without branches. Bits and Floats are uint32_t and float, or
// vectors of these.

// IEEE binary16. The compiler's own _Float16 needs a newer g++ than this package.
struct Half {
    uint16_t bits;

    template <typename Bits, typename Floats>
    SYNCBN_INLINE void widen(const Bits& half, Floats* out) {
        const Bits magnitude = half & 0x7fffu, shifted = magnitude << 13, none = {};
        Floats finite;
        copy_bits(shifted, &finite);
        finite = finite * 0x1p112f;  // the exponents' biases differ by 112, also for denormals
        Bits bits;
        copy_bits(finite, &bits);
        const Bits special = magnitude >= 0x7c00u ? none + 0x7f800000u : none;  // infinity and NaN
        bits |= special | ((half & 0x8000u) << 16);
        copy_bits(bits, out);
    }
    template <typename Bits, typename Floats>
    SYNCBN_INLINE void round(const Floats& value, Bits* out) {
        Bits bits, small;
        copy_bits(value, &bits);
        const Bits magnitude = bits & 0x7fffffffu, none = {};
        // Normal range: move the exponent and round to nearest, ties to even, in integer arithmetic.
        const Bits normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        // Below 2^-14: after adding 0.5, the float unit rounds at the denormals' last place.
        Floats shifted;
        copy_bits(magnitude, &shifted);
        shifted = shifted + 0.5f;
        copy_bits(shifted, &small);
        Bits half = magnitude < 0x38800000u ? small - 0x3f000000u : normal;
        half = magnitude >= 0x477ff000u ? none + 0x7c00u : half;  // 65520 and above round to infinity
        half = magnitude > 0x7f800000u ? none + 0x7e00u : half;   // NaN stays NaN
        *out = half | ((bits >> 16) & 0x8000u);
    }
};

// The upper half of a binary32.
struct Bfloat16 {
    uint16_t bits;

    template <typename Bits, typename Floats>
    SYNCBN_INLINE void widen(const Bits& upper, Floats* out) {
        const Bits bits = upper << 16;
        copy_bits(bits, out);
    }
    template <typename Bits, typename Floats>
    SYNCBN_INLINE void round(const Floats& value, Bits* out) {
        Bits bits;
        copy_bits(value, &bits);
        // To nearest, ties to even; what is too large becomes infinity by the carry. NaN stays NaN.
        const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, nan = (bits >> 16) | 0x40u;
        *out = (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
    }
};

// How kernels compute with a type, and read and write it.
template <typename T, bool Converted = sizeof(T) == sizeof(uint16_t)>
struct Value {
    using Compute = T;
    SYNCBN_INLINE T load(const T* p) { return *p; }
    SYNCBN_INLINE void store(T* p, T v) { *p = v; }
};
template <typename T>
struct Value<T, true> {
    using Compute = float;
    SYNCBN_INLINE float load(const T* p) {
        float value;
        T::widen(uint32_t{p->bits}, &value);
        return value;
    }
    SYNCBN_INLINE void store(T* p, float v) {
        uint32_t bits;
        T::round(v, &bits);
        p->bits = static_cast<uint16_t>(bits);
    }
};
template <typename T>
using Compute = typename Value<T>::Compute;

// Whether oneDNN puts the type into blocks of channels.
template <typename T>
constexpr bool kInBlocks = std::is_same<T, float>::value || std::is_same<T, Bfloat16>::value;

// Calls f with a null pointer of the data's type.
#define SYNCBN_CASE(TYPE, T) \
    case Type::TYPE:         \
        return f(static_cast<T*>(nullptr));
template <typename F>
void with_type(Type type, const F& f) {
    switch (type) { SYNCBN_NUMBERS(SYNCBN_CASE) }
}
#undef SYNCBN_CASE

}  // namespace syncbn::cpu

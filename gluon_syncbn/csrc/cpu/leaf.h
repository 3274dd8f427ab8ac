// What leaves are made of, for every layout: vectors, the constants of channels, what stands behind a normalisation.
//
// A leaf is the inner loop of a kernel. Leaves are compiled for several instruction sets and chosen at load time. They take
// no thread and no lock; OpenMP stays outside, because an outlined parallel region would lose the clone's instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/half.h"
#include "cpu/kernels.h"

// SYNCBN_CLONES: a function for each instruction set. SYNCBN_FOR_EACH_SET(define): the same where the code depends on the
// set, as define(attribute, how many float64 its registers hold).
#if defined(SYNCBN_CLONES)  // a test compiles one instruction set alone, and says how wide it is
#define SYNCBN_FOR_EACH_SET(define) define(SYNCBN_CLONES, SYNCBN_WIDTH)
#elif defined(__x86_64__) && defined(__gnu_linux__)
#define SYNCBN_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#if defined(__clang__)  // in AVX-512F alone it knows no way to choose between 8 floats
#define SYNCBN_AVX512 __attribute__((target("avx512f,avx512vl")))
#else  // whose older versions do not tell processors apart by VL
#define SYNCBN_AVX512 __attribute__((target("avx512f")))
#endif
#define SYNCBN_FOR_EACH_SET(define)                                         \
    define(SYNCBN_AVX512, 8) define(__attribute__((target("avx2,fma"))), 4) \
        define(__attribute__((target("default"))), 2)
#else
#define SYNCBN_CLONES
#define SYNCBN_FOR_EACH_SET(define) define(, 2)
#endif
#define SYNCBN_INLINE static inline __attribute__((always_inline))
#define SYNCBN_METHOD inline __attribute__((always_inline))

namespace syncbn {
namespace cpu {

constexpr int64_t kAhead = 512;  // values to fetch ahead of the sums, which otherwise wait for memory

// Eight float64 partial sums fill the widest register; two such sets hide the latency of an addition.
constexpr int kLanes = 8;

// In parts of the width that registers have: g++ keeps a vector in memory that fills several of them.
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
    SYNCBN_METHOD void subtract(double value) {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) parts[i] -= value;
    }
};

// A sum of values and one of products, in several sets of lanes that take turns: an addition need not wait for the last.
template <int Width, int Sets>
struct Sums {
    Lanes<Width> first[Sets], second[Sets];
    SYNCBN_METHOD Sums() {
#pragma GCC unroll 4
        for (int i = 0; i < Sets; ++i) {
            first[i].clear();
            second[i].clear();
        }
    }
    SYNCBN_METHOD void add(int i, const Lanes<Width>& value, const Lanes<Width>& other) {
        first[i].add(value);
        second[i].add_product(value, other);
    }
    // Set i into set i % K.
    template <int K>
    SYNCBN_METHOD void fold() {
#pragma GCC unroll 4
        for (int i = K; i < Sets; ++i) {
            first[i % K].add(first[i]);
            second[i % K].add(second[i]);
        }
    }
};
typedef float FloatLanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t BitLanes __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t HalfLanes __attribute__((vector_size(kLanes * sizeof(uint16_t))));

template <int Width>
SYNCBN_INLINE void load_lanes(const double* p, Lanes<Width>* out) {
#pragma GCC unroll 4
    for (int i = 0; i < Lanes<Width>::kParts; ++i) std::memcpy(&out->parts[i], p + i * Width, sizeof out->parts[i]);
}
SYNCBN_INLINE void load_lanes(const float* p, FloatLanes* out) { std::memcpy(out, p, sizeof *out); }
SYNCBN_INLINE void load_lanes(const Half* p, FloatLanes* out) {
    HalfLanes halves;
    std::memcpy(&halves, p, sizeof halves);
    const BitLanes bits = __builtin_convertvector(halves, BitLanes);
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
template <int Width>
SYNCBN_INLINE void widen(const Lanes<Width>& values, Lanes<Width>* out) {
#pragma GCC unroll 4
    for (int i = 0; i < Lanes<Width>::kParts; ++i) out->parts[i] = values.parts[i];
}
template <int Width>
SYNCBN_INLINE void widen(const FloatLanes& values, Lanes<Width>* out) {
    typedef float Part __attribute__((vector_size(Width * sizeof(float))));
    Part parts[Lanes<Width>::kParts];
    std::memcpy(parts, &values, sizeof parts);
#pragma GCC unroll 4
    for (int i = 0; i < Lanes<Width>::kParts; ++i)
        out->parts[i] = __builtin_convertvector(parts[i], typename Lanes<Width>::Part);
}

// A float64 mean as two values of the compute type: x - high is exact near the mean, so that an offset of
// 1e5 in float32 data costs no digits.
template <typename C>
struct Split {
    C high, low;
    explicit Split(double v) : high(static_cast<C>(v)), low(static_cast<C>(v - static_cast<double>(high))) {}
};

// What is not above 0 is multiplied; 0 and not minus infinity times it, so that ReLU is finite. A NaN stays one.
template <bool Rectify, typename C>
SYNCBN_INLINE C rectified(C z, C slope, C ceiling) {
    if (!Rectify) return z;
    return z <= 0 ? (slope == 0 ? 0 : slope * z) : z > ceiling ? ceiling : z;
}
// By z, or by what has become of it.
template <typename C>
SYNCBN_INLINE C grad_rectified(C grad, C z, C slope, C ceiling) {
    return (z > 0) & (z < ceiling) ? grad : grad * slope;
}

// What has become of z, undone; for slopes above 0.
template <typename C>
SYNCBN_INLINE C unrectified(C y, C slope) {
    return y > 0 ? y : y / slope;
}

// One value per column from one per channel.
template <typename C>
std::vector<C> spread(Shape shape, const double* per_channel, bool low_part = false) {
    std::vector<C> out(shape.channels * shape.inner);
    for (int64_t c = 0; c < shape.channels; ++c) {
        const Split<C> split(per_channel[c]);
        std::fill_n(out.begin() + c * shape.inner, shape.inner, low_part ? split.low : split.high);
    }
    return out;
}

// z of each column, and what stands behind it.
template <typename C>
struct ColumnRectified {
    const C *high, *low, *scale, *shift;
    C slope, ceiling;
    SYNCBN_METHOD C of(C x, int64_t c) const { return ((x - high[c]) - low[c]) * scale[c] + shift[c]; }
};

// The constants of each column, from those of each channel, where they are needed.
template <typename C>
struct Columns {
    std::vector<C> high, low, scale, shift;
    const C slope, ceiling;
    Columns(const Shape& shape, const Rectified& z, bool needed)
        : slope(static_cast<C>(z.activation.slope)), ceiling(static_cast<C>(z.activation.ceiling)) {
        if (!needed) return;
        high = spread<C>(shape, z.mean);
        low = spread<C>(shape, z.mean, true);
        scale = spread<C>(shape, z.scale);
        shift = spread<C>(shape, z.shift);
    }
    ColumnRectified<C> from(int64_t column) const {
        return {
            high.data() + column, low.data() + column, scale.data() + column, shift.data() + column, slope, ceiling};
    }
};

// The constants of each column.
template <typename C>
struct ColumnGradInput {
    const C *high, *low, *scale, *mean_dz, *slope;
};

// Against rounding; a NaN stays one, which std::max would hide.
inline double at_least_zero(double v) { return v < 0 ? 0 : v; }

// Of the instances of a template, the one that is asked for: <add> and whether there is an activation; and an addend.
#define SYNCBN_GRAD_INPUT(f, slope, add, ...)                                          \
    ((slope) == 1 ? (add) ? f<true, false>(__VA_ARGS__) : f<false, false>(__VA_ARGS__) \
     : (add) ? f<true, true>(__VA_ARGS__)                                              \
                  : f<false, true>(__VA_ARGS__))
#define SYNCBN_RECTIFIED(f, slope, add, addend, ...)                                                   \
    ((slope) == 1 ? (add) ? f<true, false, addend>(__VA_ARGS__) : f<false, false, addend>(__VA_ARGS__) \
     : (add) ? f<true, true, addend>(__VA_ARGS__)                                                      \
                  : f<false, true, addend>(__VA_ARGS__))
#define SYNCBN_NORMALISE(f, slope, add, x, addend, ...)                                  \
    ((addend) != nullptr ? SYNCBN_RECTIFIED(f, slope, add, true, x, addend, __VA_ARGS__) \
                         : SYNCBN_RECTIFIED(f, slope, add, false, x, addend, __VA_ARGS__))

}  // namespace cpu
}  // namespace syncbn

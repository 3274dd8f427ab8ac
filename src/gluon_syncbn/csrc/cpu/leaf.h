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

#if defined(SYNCBN_CLONES)  // a test compiles one instruction set alone
#elif defined(__x86_64__) && defined(__gnu_linux__)
#define SYNCBN_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SYNCBN_CLONES
#endif
#define SYNCBN_INLINE static inline __attribute__((always_inline))
#define SYNCBN_METHOD inline __attribute__((always_inline))

namespace syncbn {
namespace cpu {

constexpr int64_t kAhead = 512;  // values to fetch ahead of the sums, which otherwise wait for memory

// Eight float64 partial sums fill the widest register; two such sets hide the latency of an addition.
constexpr int kLanes = 8;
typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));
typedef float FloatLanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t BitLanes __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t HalfLanes __attribute__((vector_size(kLanes * sizeof(uint16_t))));

SYNCBN_INLINE void load_lanes(const double* p, Lanes* out) { std::memcpy(out, p, sizeof *out); }
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
SYNCBN_INLINE void widen(const Lanes& values, Lanes* out) { *out = values; }
SYNCBN_INLINE void widen(const FloatLanes& values, Lanes* out) { *out = __builtin_convertvector(values, Lanes); }

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

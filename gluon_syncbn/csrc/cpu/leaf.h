// Provides the parts of leaves, for every layout: vectors, the constants of channels, activations.
//
// A leaf is the inner loop of a kernel. Leaves are compiled for several instruction sets and chosen at load time. They
// contain no OpenMP, because an outlined parallel region would lose the clone's instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/numbers.h"

// SYNCBN_CLONES compiles a function for each instruction set. SYNCBN_FOR_EACH_SET(define) does so for code that depends
// on the set, as define(attribute, number of float64 in a register).
#if defined(SYNCBN_CLONES)  // a test compiles one instruction set alone, and sets its width
#define SYNCBN_FOR_EACH_SET(define) define(SYNCBN_CLONES, SYNCBN_WIDTH)
#elif defined(__x86_64__) && defined(__gnu_linux__)
#define SYNCBN_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#if defined(__clang__)  // with AVX-512F alone, clang cannot choose between 8 floats
#define SYNCBN_AVX512 __attribute__((target("avx512f,avx512vl")))
#else  // older g++ versions do not distinguish processors by VL
#define SYNCBN_AVX512 __attribute__((target("avx512f")))
#endif
#define SYNCBN_FOR_EACH_SET(define)                                         \
    define(SYNCBN_AVX512, 8) define(__attribute__((target("avx2,fma"))), 4) \
        define(__attribute__((target("default"))), 2)
#else
#define SYNCBN_CLONES
#define SYNCBN_FOR_EACH_SET(define) define(, 2)
#endif

namespace syncbn {
namespace cpu {

constexpr int64_t kAhead = 512;  // values to prefetch for the sums, which otherwise wait for memory

// A sum of values and one of products, in several sets of lanes in turn, so that additions do not wait for each other.
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
    // Adds set i to set i % K.
    template <int K>
    SYNCBN_METHOD void fold() {
#pragma GCC unroll 4
        for (int i = K; i < Sets; ++i) {
            first[i % K].add(first[i]);
            second[i % K].add(second[i]);
        }
    }
};

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

// FloatLanes in parts of the registers' width: g++ compares wider vectors one value at a time.
template <int Width>
struct FloatParts {
    static constexpr int kFloats = Width < 4 ? 2 * Width : kLanes, kParts = kLanes / kFloats;
    typedef float Part __attribute__((vector_size(kFloats * sizeof(float))));
    Part parts[kParts];
    SYNCBN_METHOD explicit FloatParts(const FloatLanes& from) { std::memcpy(parts, &from, sizeof parts); }
    SYNCBN_METHOD void store(FloatLanes* to) const { std::memcpy(to, parts, sizeof parts); }
};

// An activation of FloatLanes.
template <class A, int Width>
class OnLanes {
  public:
    SYNCBN_METHOD explicit OnLanes(const Activation& activation) : of_part_(activation.slope, activation.ceiling) {}
    SYNCBN_METHOD void apply(FloatLanes* z) const {
        Parts all(*z);
#pragma GCC unroll 2
        for (int i = 0; i < Parts::kParts; ++i) of_part_.apply(&all.parts[i]);
        all.store(z);
    }
    SYNCBN_METHOD void through(FloatLanes* grads, const FloatLanes& z) const {
        Parts all(*grads);
        const Parts at(z);
#pragma GCC unroll 2
        for (int i = 0; i < Parts::kParts; ++i) of_part_.through(&all.parts[i], at.parts[i]);
        all.store(grads);
    }
    SYNCBN_METHOD void undo(FloatLanes* y) const {
        Parts all(*y);
#pragma GCC unroll 2
        for (int i = 0; i < Parts::kParts; ++i) of_part_.undo(&all.parts[i]);
        all.store(y);
    }

  private:
    using Parts = FloatParts<Width>;
    const typename A::template On<typename Parts::Part, float> of_part_;
};

// Splits a float64 mean into two values of the compute type. Near the mean, x - high is exact, so an offset of 1e5 in
// float32 data costs no digits.
template <typename C>
struct Split {
    C high, low;
    explicit Split(double v) : high(static_cast<C>(v)), low(static_cast<C>(v - static_cast<double>(high))) {}
};

// Expands one value per channel to one per column.
template <typename C>
std::vector<C> broadcast(Shape shape, const double* per_channel, bool low_part = false) {
    std::vector<C> out(shape.channels * shape.inner);
    for (int64_t c = 0; c < shape.channels; ++c) {
        const Split<C> split(per_channel[c]);
        std::fill_n(out.begin() + c * shape.inner, shape.inner, low_part ? split.low : split.high);
    }
    return out;
}

// z of each column, and the activation.
template <typename C>
struct ColumnRectified {
    const C *high, *low, *scale, *shift;
    Activation activation;
};

// The constants of each column, from those of each channel, if needed.
template <typename C>
struct Columns {
    std::vector<C> high, low, scale, shift;
    const Activation activation;
    Columns(const Shape& shape, const Rectified& z, bool needed) : activation(z.activation) {
        if (!needed) return;
        high = broadcast<C>(shape, z.mean);
        low = broadcast<C>(shape, z.mean, true);
        scale = broadcast<C>(shape, z.scale);
        shift = broadcast<C>(shape, z.shift);
    }
    ColumnRectified<C> from(int64_t column) const {
        return {high.data() + column, low.data() + column, scale.data() + column, shift.data() + column, activation};
    }
};

// The constants of each column.
template <typename C>
struct ColumnGradInput {
    const C *high, *low, *scale, *mean_dz, *slope;
};

// The positions that count: how many there are, and which is the first.
struct Counting {
    int64_t positions, first;
    explicit Counting(const Work& work) : positions(work.shape.per_channel()), first(0) {
        if (work.mask == nullptr) return;
        const float* const end = work.mask + positions;
        first = std::find_if(work.mask, end, [](float value) { return value != 0; }) - work.mask;
        positions = std::count_if(work.mask + first, end, [](float value) { return value != 0; });
    }
};

// Removes rounding below 0; a NaN stays a NaN, which std::max would hide.
inline double at_least_zero(double v) { return v < 0 ? 0 : v; }

// Selects an instance of a template: in the statements, the compiler knows NAME, a bool or an activation.
#define SYNCBN_IF(condition, NAME, ...) \
    if (condition) {                    \
        constexpr bool NAME = true;     \
        __VA_ARGS__                     \
    } else {                            \
        constexpr bool NAME = false;    \
        __VA_ARGS__                     \
    }
#define SYNCBN_CASE_OF_ACTIVATION(name, TRAIT, NAME, ...) \
    case Activation::Kind::k##TRAIT: {                    \
        using NAME = TRAIT;                               \
        __VA_ARGS__                                       \
        break;                                            \
    }
#define SYNCBN_ACTIVATION(of, NAME, ...) \
    switch ((of).kind) { SYNCBN_ACTIVATIONS(SYNCBN_CASE_OF_ACTIVATION, NAME, __VA_ARGS__) }

}  // namespace cpu
}  // namespace syncbn

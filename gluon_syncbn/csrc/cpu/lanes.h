// Defines eight values at a time, and the same functions for them and for a single value, so that a formula is of both.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/numbers.h"

#define SYNCBN_UNROLL _Pragma("GCC unroll 4")

namespace syncbn::cpu {

// Eight float64 partial sums fill the widest register.
constexpr int kLanes = 8;
// Eight values of 16 bits, and of 32.
typedef uint16_t Shorts __attribute__((vector_size(kLanes * sizeof(uint16_t))));
typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));

// In vectors of the registers' width, of `Width` float64, because g++ keeps a vector of several registers in memory and
// compares its values one by one.
template <typename C, int Width>
struct Lanes {
    static constexpr int kFit = Width * sizeof(double) / sizeof(C), kInRegister = kFit < kLanes ? kFit : kLanes;
    static constexpr int kRegisters = kLanes / kInRegister;
    typedef C Register __attribute__((vector_size(kInRegister * sizeof(C))));
    Register registers[kRegisters];

#define SYNCBN_LANEWISE(op)                                                                         \
    SYNCBN_METHOD Lanes operator op(const Lanes& other) const {                                     \
        Lanes out;                                                                                  \
        SYNCBN_UNROLL                                                                               \
        for (int i = 0; i < kRegisters; ++i) out.registers[i] = registers[i] op other.registers[i]; \
        return out;                                                                                 \
    }
    SYNCBN_LANEWISE(+)
    SYNCBN_LANEWISE(-)
    SYNCBN_LANEWISE(*)
#undef SYNCBN_LANEWISE
};

template <typename C, int Width>
SYNCBN_INLINE void put_all(C value, Lanes<C, Width>* out) {
    SYNCBN_UNROLL
    for (auto& one : out->registers) one = typename Lanes<C, Width>::Register{} + value;
}

template <typename T>
SYNCBN_INLINE void load(const T* p, Compute<T>* out) {
    *out = Value<T>::load(p);
}
template <typename T, typename C, int Width>
SYNCBN_INLINE void load(const T* p, Lanes<C, Width>* out) {
    using Of = Lanes<C, Width>;
    if constexpr (std::is_same<T, C>::value) {
        SYNCBN_UNROLL
        for (int i = 0; i < Of::kRegisters; ++i)
            std::memcpy(&out->registers[i], p + i * Of::kInRegister, sizeof out->registers[i]);
    } else {
        Shorts values;
        copy_bits(*reinterpret_cast<const uint16_t(*)[kLanes]>(p), &values);
        Lanes<uint32_t, Width> bits;
        copy_bits(__builtin_convertvector(values, Bits), &bits);
        SYNCBN_UNROLL
        for (int i = 0; i < Of::kRegisters; ++i) T::widen(bits.registers[i], &out->registers[i]);
    }
}

template <typename T>
SYNCBN_INLINE void store(const Compute<T>& value, T* p) {
    Value<T>::store(p, value);
}
template <typename T, typename C, int Width>
SYNCBN_INLINE void store(const Lanes<C, Width>& from, T* p) {
    using Of = Lanes<C, Width>;
    if constexpr (std::is_same<T, C>::value) {
        SYNCBN_UNROLL
        for (int i = 0; i < Of::kRegisters; ++i)
            std::memcpy(p + i * Of::kInRegister, &from.registers[i], sizeof from.registers[i]);
    } else {
        Lanes<uint32_t, Width> rounded;
        SYNCBN_UNROLL
        for (int i = 0; i < Of::kRegisters; ++i) T::round(from.registers[i], &rounded.registers[i]);
        Bits bits;
        copy_bits(rounded, &bits);
        const Shorts values = __builtin_convertvector(bits, Shorts);
        std::memcpy(p, &values, sizeof values);
    }
}

template <typename C>
SYNCBN_INLINE void widen(C value, double* out) {
    *out = value;
}
template <typename C, int Width>
SYNCBN_INLINE void widen(const Lanes<C, Width>& values, Lanes<double, Width>* out) {
    using Wide = Lanes<double, Width>;
    typedef C Register __attribute__((vector_size(Wide::kInRegister * sizeof(C))));
    Register registers[Wide::kRegisters];
    copy_bits(values, &registers);
    SYNCBN_UNROLL
    for (int i = 0; i < Wide::kRegisters; ++i)
        out->registers[i] = __builtin_convertvector(registers[i], typename Wide::Register);
}

// Sets values to 0 where the mask is 0. `true`: all count.
template <typename W>
SYNCBN_INLINE void keep(W*, bool) {}
template <int Width>
SYNCBN_INLINE void keep(Lanes<double, Width>* values, const float* mask) {
    using Wide = Lanes<double, Width>;
    Lanes<float, Width> marks;
    Wide wide;
    load(mask, &marks);
    widen(marks, &wide);
    SYNCBN_UNROLL
    for (int i = 0; i < Wide::kRegisters; ++i)
        values->registers[i] = wide.registers[i] != 0 ? values->registers[i] : typename Wide::Register{};
}

template <int Width>
SYNCBN_INLINE double total(const Lanes<double, Width>& lanes) {
    double sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += lanes.registers[i / Width][i % Width];
    return sum;
}

// An activation, if there is any, of a value.
template <bool Any>
using Trait = std::conditional_t<Any, Rectifier, Identity>;
template <class A, typename V>
struct Behind : A::template On<V> {
    SYNCBN_METHOD explicit Behind(const Activation& with) : A::template On<V>(with.slope, with.ceiling) {}
};
template <class A, typename C, int Width>
struct Behind<A, Lanes<C, Width>> {
    using V = Lanes<C, Width>;
    const typename A::template On<typename V::Register, C> of_register;
    SYNCBN_METHOD explicit Behind(const Activation& with) : of_register(with.slope, with.ceiling) {}
    SYNCBN_METHOD void apply(V* z) const {
        SYNCBN_UNROLL
        for (auto& one : z->registers) of_register.apply(&one);
    }
    SYNCBN_METHOD void through(V* grad, const V& z) const {
        SYNCBN_UNROLL
        for (int i = 0; i < V::kRegisters; ++i) of_register.through(&grad->registers[i], z.registers[i]);
    }
};

}  // namespace syncbn::cpu

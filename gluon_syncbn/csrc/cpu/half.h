// Converts between IEEE binary16 and binary32 without branches, so that loops with it vectorise on every machine. The
// compiler's own _Float16 needs a newer g++ than this package.
#pragma once

#include <cstdint>
#include <cstring>

namespace syncbn {

struct Half {
    uint16_t bits;
};

inline __attribute__((always_inline)) float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline __attribute__((always_inline)) uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline __attribute__((always_inline)) float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    // The exponents' biases differ by 112: a product with 2^112 corrects it, also for denormals.
    const uint32_t finite = float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f);
    const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN
    return bits_to_float(finite | special | sign);
}

inline __attribute__((always_inline)) uint16_t float_to_half(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal range: move the exponent and round to nearest, ties to even, in integer arithmetic.
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14: after adding 0.5, the float unit rounds at the denormals' last place.
    const uint32_t small = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? small : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to infinity
    half = magnitude > 0x7f800000u ? 0x7e00u : half;   // NaN stays NaN
    return static_cast<uint16_t>(half | sign);
}

}  // namespace syncbn

// bfloat16, the upper half of a binary32 <-> binary32 without branches, so that the loops around them vectorise.
#pragma once

#include <cstdint>

#include "cpu/half.h"

namespace syncbn {

struct Bfloat16 {
    uint16_t bits;
};

inline __attribute__((always_inline)) float bfloat16_to_float(uint16_t upper) {
    return bits_to_float(static_cast<uint32_t>(upper) << 16);
}

inline __attribute__((always_inline)) uint16_t float_to_bfloat16(float value) {
    const uint32_t bits = float_to_bits(value);
    // To nearest, ties to even; what is too large becomes infinity by the carry.
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;  // stays NaN
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

}  // namespace syncbn

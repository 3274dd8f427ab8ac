// float16 as bits, for kernels (shim.h) and for NCCL's sums: on every x86-64, with any compiler.
#pragma once

inline float emulated_float_of_bits(unsigned bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned emulated_bits_of_float(float value) {
    unsigned bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float emulated_half_to_float(unsigned short half) {
    const unsigned magnitude = half & 0x7fffu;
    float value;
    if (magnitude >= 0x7c00u)  // infinities and NaN
        value = emulated_float_of_bits(0x7f800000u | (magnitude & 0x3ffu) << 13);
    else  // the exponent is 112 too small; the product also makes subnormals right
        value = emulated_float_of_bits(magnitude << 13) * 0x1p112f;
    return half & 0x8000u ? -value : value;
}

// To the nearest, ties to the even one.
inline unsigned short emulated_float_to_half(float value) {
    const unsigned bits = emulated_bits_of_float(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    unsigned half;
    if (magnitude > 0x7f800000u)
        half = 0x7fffu;  // NaN, as the device writes it
    else if (magnitude >= 0x477ff000u)
        half = 0x7c00u;  // 65520 and above are nearer to what follows 65504: infinity
    else if (magnitude >= 0x38800000u)
        half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    else  // the addition rounds to multiples of 2^-24, the distance of subnormals
        half = emulated_bits_of_float(emulated_float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    return static_cast<unsigned short>(sign | half);
}

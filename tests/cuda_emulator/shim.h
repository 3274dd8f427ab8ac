// What makes CUDA C++ for NVRTC compile with g++: included before the source by nvrtc.cc. Includes no header of the
// C++ library, because NVRTC's sources cannot either. Defines CUDA_EMULATOR, and neither __CUDACC__ nor
// __CUDA_ARCH__: what they guard is device assembly. Has what csrc/cuda/kernels.cu uses of
// CUDA, and no more.
#pragma once

#define CUDA_EMULATOR 1

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

// __global__ is defined by nvrtc.cc, which looks for what it expands to.
#define __device__
#define __launch_bounds__(...)
// A block runs on one thread of the operating system: what is thread-local is one per block that runs, and static
// in a function.
#define __shared__ thread_local

// ---- the emulator's functions --------------------------------------------------------------------------------

struct EmulatedDimensions {
    unsigned x, y, z;
};
struct EmulatedIndex {
    EmulatedDimensions thread, block, grid_size;
};
extern "C" {
__attribute__((const)) const EmulatedIndex* emulated_index();  // const: each thread has its own
void emulated_barrier(int line);
}

#define threadIdx (emulated_index()->thread)
#define blockIdx (emulated_index()->block)
#define gridDim (emulated_index()->grid_size)

#define __syncthreads() emulated_barrier(__LINE__)

// ---- float16 as bits, on every x86-64, with any compiler ----------------------------------------------------

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

// ---- arithmetic ----------------------------------------------------------------------------------------------

inline double rsqrt(double x) { return 1 / __builtin_sqrt(x); }
template <typename T>
inline bool isfinite(T x) {
    return __builtin_isfinite(x);
}

// ---- what the emulator needs to know of a kernel, see `Kernel` in emulator.h -----------------------------------

struct EmulatedKernel {
    const char* name;
    unsigned parameters;
    const unsigned* sizes;
    void (*run)(void** values);
};
template <int... I>
struct EmulatedNumbers {};
template <typename F, F kernel>
struct EmulatedEntry;
template <typename... P, void (*kernel)(P...)>
struct EmulatedEntry<void (*)(P...), kernel> {
    static constexpr unsigned sizes[sizeof...(P) + 1] = {sizeof(P)...};
    template <int... I>
    static void call(void** values, EmulatedNumbers<I...>) {
        kernel(*static_cast<P*>(values[I])...);
    }
    static void run(void** values) { call(values, EmulatedNumbers<__integer_pack(sizeof...(P))...>()); }
    static constexpr EmulatedKernel make(const char* name) { return {name, sizeof...(P), sizes, run}; }
};
template <typename... P, void (*kernel)(P...)>
constexpr unsigned EmulatedEntry<void (*)(P...), kernel>::sizes[];

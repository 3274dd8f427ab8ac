// What makes CUDA C++ for NVRTC compile with g++: included before the source by nvrtc.cc. Includes no header of the
// C++ library, because NVRTC's sources cannot either. Defines CUDA_EMULATOR, and neither __CUDACC__ nor
// __CUDA_ARCH__: what they guard is device assembly. Has what csrc/cuda/kernels.cu uses of
// CUDA, and no more.
#pragma once

#include "float16.h"

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
    EmulatedDimensions thread, block, block_size, grid_size;
};
extern "C" {
__attribute__((const)) const EmulatedIndex* emulated_index();  // const: each thread has its own
void emulated_barrier(int line);
}

#define threadIdx (emulated_index()->thread)
#define blockIdx (emulated_index()->block)
#define blockDim (emulated_index()->block_size)
#define gridDim (emulated_index()->grid_size)

#define __syncthreads() emulated_barrier(__LINE__)

// ---- arithmetic ----------------------------------------------------------------------------------------------

extern "C" double sqrt(double);
extern "C" double fabs(double);
inline float fabs(float x) { return __builtin_fabsf(x); }
inline double rsqrt(double x) { return 1 / __builtin_sqrt(x); }
template <typename T>
inline bool isfinite(T x) {
    return __builtin_isfinite(x);
}

// ---- what the emulator needs to know of a kernel, see EmulatedKernel in launch.h -----------------------------------

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
    // The values are the emulator's own memory, which checked code may not read.
    template <int... I>
    __attribute__((no_sanitize_thread, no_sanitize_undefined)) static void call(void** values, EmulatedNumbers<I...>) {
        kernel(*static_cast<P*>(values[I])...);
    }
    __attribute__((no_sanitize_thread, no_sanitize_undefined)) static void run(void** values) {
        call(values, EmulatedNumbers<__integer_pack(sizeof...(P))...>());
    }
    static constexpr EmulatedKernel make(const char* name) { return {name, sizeof...(P), sizes, run}; }
};
template <typename... P, void (*kernel)(P...)>
constexpr unsigned EmulatedEntry<void (*)(P...), kernel>::sizes[];

thread_local char emulated_anchor;
extern "C" __attribute__((visibility("default"), no_sanitize_thread)) void* emulated_shared_anchor() {
    return &emulated_anchor;
}

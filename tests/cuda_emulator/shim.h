// What makes CUDA C++ for NVRTC compile with g++: included before the source by nvrtc.cc. Includes no header of the
// C++ library, because NVRTC's sources cannot either. Defines CUDA_EMULATOR, and neither __CUDACC__ nor
// __CUDA_ARCH__: what they guard is device assembly.
#pragma once

#include "float16.h"

#define CUDA_EMULATOR 1

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

// __global__ is defined by nvrtc.cc, which looks for what it expands to.
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// A block runs on one thread of the operating system: what is thread-local is one per block that runs, and static
// in a function. The dynamic kind, `extern __shared__ T name[];`, is rewritten by nvrtc.cc.
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
void* emulated_dynamic_shared();
void emulated_barrier(int line);
void emulated_exchange(const char* what, int line, unsigned mask, unsigned long long value);
unsigned long long emulated_given(unsigned mask, unsigned lane);
unsigned emulated_lane();
void emulated_failure(const char* text);
void emulated_atomic(void* where, size_t size);
void* emulated_memcpy(void* to, const void* from, size_t size);
void* emulated_memset(void* to, int value, size_t size);
int printf(const char*, ...);
}
#define memcpy emulated_memcpy
#define memmove emulated_memcpy
#define memset emulated_memset
#define assert(condition) ((condition) ? (void)0 : emulated_failure("assertion failed: " #condition))
#define __trap() emulated_failure("__trap")

#define threadIdx (emulated_index()->thread)
#define blockIdx (emulated_index()->block)
#define blockDim (emulated_index()->block_size)
#define gridDim (emulated_index()->grid_size)
#define warpSize 32

#define __syncthreads() emulated_barrier(__LINE__)
#define __threadfence() ((void)0)  // one thread of the operating system
#define __threadfence_block() ((void)0)

// ---- vector types --------------------------------------------------------------------------------------------

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define EMULATED_VECTORS(SCALAR, NAME)                                                                  \
    struct NAME##1 { SCALAR x; };                                                                       \
    struct __align__(2 * sizeof(SCALAR)) NAME##2 { SCALAR x, y; };                                      \
    struct NAME##3 { SCALAR x, y, z; };                                                                 \
    struct __align__(4 * sizeof(SCALAR) < 16 ? 4 * sizeof(SCALAR) : 16) NAME##4 { SCALAR x, y, z, w; }; \
    inline NAME##1 make_##NAME##1(SCALAR x) { return NAME##1 {x}; }                                     \
    inline NAME##2 make_##NAME##2(SCALAR x, SCALAR y) { return NAME##2 {x, y}; }                        \
    inline NAME##3 make_##NAME##3(SCALAR x, SCALAR y, SCALAR z) { return NAME##3 {x, y, z}; }           \
    inline NAME##4 make_##NAME##4(SCALAR x, SCALAR y, SCALAR z, SCALAR w) { return NAME##4 {x, y, z, w}; }
EMULATED_VECTORS(signed char, char)
EMULATED_VECTORS(unsigned char, uchar)
EMULATED_VECTORS(short, short)
EMULATED_VECTORS(unsigned short, ushort)
EMULATED_VECTORS(int, int)
EMULATED_VECTORS(unsigned, uint)
EMULATED_VECTORS(long long, longlong)
EMULATED_VECTORS(unsigned long long, ulonglong)
EMULATED_VECTORS(float, float)
EMULATED_VECTORS(double, double)

// ---- lanes of a warp -----------------------------------------------------------------------------------------

template <typename T>
inline unsigned long long emulated_bits(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    return bits;
}
template <typename T>
inline T emulated_value(unsigned long long bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// `direction` as in the name of the shuffle; lanes move within sections of `width`.
template <typename T>
inline T emulated_shuffle(const char* what, char direction, int line, unsigned mask, T value, int amount,
                          int width = 32) {
    const int lane = static_cast<int>(emulated_lane()), first = lane & ~(width - 1);
    int source = direction == 'd'   ? lane + amount
                 : direction == 'u' ? lane - amount
                 : direction == 'x' ? lane ^ amount
                                    : first + (amount & (width - 1));
    if (direction == 'u' ? source < first : source >= first + width) source = lane;
    emulated_exchange(what, line, mask, emulated_bits(value));
    return emulated_value<T>(emulated_given(mask, static_cast<unsigned>(source)));
}
#define __shfl_sync(...) emulated_shuffle("__shfl_sync", 'i', __LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) emulated_shuffle("__shfl_up_sync", 'u', __LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) emulated_shuffle("__shfl_down_sync", 'd', __LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) emulated_shuffle("__shfl_xor_sync", 'x', __LINE__, __VA_ARGS__)

inline unsigned emulated_ballot(const char* what, int line, unsigned mask, int predicate) {
    emulated_exchange(what, line, mask, predicate != 0);
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) result |= static_cast<unsigned>(emulated_given(mask, lane)) << lane;
    return result;
}
#define __ballot_sync(mask, predicate) emulated_ballot("__ballot_sync", __LINE__, mask, predicate)
#define __any_sync(mask, predicate) (emulated_ballot("__any_sync", __LINE__, mask, predicate) != 0)
#define __all_sync(mask, predicate) (emulated_ballot("__all_sync", __LINE__, mask, predicate) == (mask))
inline void emulated_syncwarp(int line, unsigned mask = 0xffffffffu) { emulated_exchange("__syncwarp", line, mask, 0); }
#define __syncwarp(...) emulated_syncwarp(__LINE__, ##__VA_ARGS__)

// ---- atomics -------------------------------------------------------------------------------------------------

// The threads of a launch take turns, at barriers and shuffles only, so that plain code is atomic. It is checked by
// hand, because two of these on one address are no race.
#define EMULATED_ATOMIC __attribute__((noinline, no_sanitize_thread, no_sanitize_undefined))
template <typename T, typename V>
EMULATED_ATOMIC T atomicAdd(T* where, V value) {
    emulated_atomic(where, sizeof(T));
    const T before = *where;
    *where = before + static_cast<T>(value);
    return before;
}
template <typename T, typename V>
EMULATED_ATOMIC T atomicMax(T* where, V value) {
    emulated_atomic(where, sizeof(T));
    const T before = *where;
    if (static_cast<T>(value) > before) *where = static_cast<T>(value);
    return before;
}
template <typename T, typename V>
EMULATED_ATOMIC T atomicExch(T* where, V value) {
    emulated_atomic(where, sizeof(T));
    const T before = *where;
    *where = static_cast<T>(value);
    return before;
}
template <typename T, typename C, typename V>
EMULATED_ATOMIC T atomicCAS(T* where, C compare, V value) {
    emulated_atomic(where, sizeof(T));
    const T before = *where;
    if (before == static_cast<T>(compare)) *where = static_cast<T>(value);
    return before;
}

template <typename T>
inline T __ldg(const T* where) {
    return *where;
}

// ---- arithmetic ----------------------------------------------------------------------------------------------

#define EMULATED_ORDER(TYPE)                                  \
    inline TYPE min(TYPE a, TYPE b) { return b < a ? b : a; } \
    inline TYPE max(TYPE a, TYPE b) { return a < b ? b : a; }
EMULATED_ORDER(int)
EMULATED_ORDER(unsigned)
EMULATED_ORDER(long)
EMULATED_ORDER(unsigned long)
EMULATED_ORDER(long long)
EMULATED_ORDER(unsigned long long)
inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
// With NaN, the other one, as on the device.
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }

// f(double), f(float) and ff(float), as CUDA has them
#define EMULATED_FUNCTION(NAME)      \
    extern "C" double NAME(double);  \
    extern "C" float NAME##f(float); \
    inline float NAME(float x) { return __builtin_##NAME##f(x); }
EMULATED_FUNCTION(sqrt)
EMULATED_FUNCTION(fabs)
EMULATED_FUNCTION(floor)
EMULATED_FUNCTION(ceil)
EMULATED_FUNCTION(trunc)
EMULATED_FUNCTION(rint)
EMULATED_FUNCTION(exp)
EMULATED_FUNCTION(log)
EMULATED_FUNCTION(tanh)
#define EMULATED_FUNCTION2(NAME)            \
    extern "C" double NAME(double, double); \
    extern "C" float NAME##f(float, float); \
    inline float NAME(float x, float y) { return __builtin_##NAME##f(x, y); }
EMULATED_FUNCTION2(fmin)
EMULATED_FUNCTION2(fmax)
EMULATED_FUNCTION2(pow)
EMULATED_FUNCTION2(copysign)
extern "C" double fma(double, double, double);
extern "C" float fmaf(float, float, float);
inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
extern "C" int abs(int);
inline double rsqrt(double x) { return 1 / __builtin_sqrt(x); }
inline float rsqrtf(float x) { return static_cast<float>(1 / __builtin_sqrt(static_cast<double>(x))); }
inline float rsqrt(float x) { return rsqrtf(x); }
template <typename T>
inline bool isnan(T x) {
    return __builtin_isnan(x);
}
template <typename T>
inline bool isinf(T x) {
    return __builtin_isinf(x);
}
template <typename T>
inline bool isfinite(T x) {
    return __builtin_isfinite(x);
}
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __float_as_int(float x) { return emulated_value<int>(emulated_bits(x)); }
inline unsigned __float_as_uint(float x) { return emulated_value<unsigned>(emulated_bits(x)); }
inline float __int_as_float(int x) { return emulated_value<float>(emulated_bits(x)); }
inline float __uint_as_float(unsigned x) { return emulated_value<float>(emulated_bits(x)); }
inline long long __double_as_longlong(double x) { return emulated_value<long long>(emulated_bits(x)); }
inline double __longlong_as_double(long long x) { return emulated_value<double>(emulated_bits(x)); }

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

// Hands functions to Python, as those of `_native`. They may throw: `Caught` hands their results and exceptions over.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "failure.h"
#include "mxnet_api.h"
#include "types.h"

// Begins a function, which Python finds by its name as a pointer, beside its declaration, in which it reads the types.
#define SYNCBN_API(result, name, ...)                                                              \
    static result api_##name(__VA_ARGS__);                                                         \
    extern "C" {                                                                                   \
    __attribute__((visibility("default"))) auto syncbn_##name = &syncbn::Caught<api_##name>::call; \
    __attribute__((visibility("default"))) extern const char syncbn_declared_##name[] =            \
        #result ", " #name ", " #__VA_ARGS__;                                                      \
    }                                                                                              \
    static result api_##name(__VA_ARGS__)

// Begins the definition of counts that tests find by their names.
#define SYNCBN_COUNTS __attribute__((visibility("default"))) std::atomic<int64_t>

namespace syncbn {

using NDArrayHandle = void*;  // MXNet's; in Python an NDArray
using Bytes = std::string;    // `bytes` in Python, where a std::string is a text

inline thread_local std::string kept_problem;
inline thread_local const char* problem = "";  // of this thread's last call that returned null or -1

// What Python gets of a result: -1 or null after an exception. Texts and bytes stay until this thread's next call,
// exchanges as long as the process.
inline const Span<const char>* handed(std::string bytes) {
    static thread_local std::string kept;
    static thread_local Span<const char> span;
    kept = std::move(bytes);
    span = {static_cast<int64_t>(kept.size()), kept.data()};
    return &span;
}
inline int handed(bool value) { return value; }
template <typename Value>
auto handed(Value value) {
    if constexpr (std::is_class_v<Value>)
        return new Value(std::move(value));
    else
        return value;
}

// A function of C that catches what this one throws.
template <auto function>
struct Caught;
template <typename Result, typename... Parameters, Result (*function)(Parameters...)>
struct Caught<function> {
    static auto call(Parameters... parameters) noexcept {
        const auto run = [&] {
            if constexpr (std::is_void_v<Result>)
                return function(parameters...), 0;
            else
                return handed(function(parameters...));
        };
        try {
            return run();
        } catch (const std::exception& e) {
            try {
                problem = (kept_problem = reason_of(e)).c_str();
            } catch (const std::bad_alloc&) {
                problem = kNoMemory;
            }
        }
        if constexpr (std::is_pointer_v<decltype(run())>)
            return decltype(run()){nullptr};
        else
            return decltype(run()){-1};
    }
};

// Of MXNet's functions.
inline void check(int status) {
    if (status != 0) throw Failure(mx.MXGetLastError());
}

}  // namespace syncbn

// Declares the few functions of MXNet's C interface that the operator needs. They are a stable ABI. Declared here,
// MXNet is not needed for the build: the functions come from the library that Python has loaded.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "types.h"

extern "C" {
struct MXCallbackList {
    int num_callbacks;
    int (**callbacks)(void);
    void** contexts;
};
typedef int (*CustomOpPropCreator)(const char* op_type, const int num_kwargs, const char** keys, const char** values,
                                   struct MXCallbackList* ret);
}

namespace dmlc {
// The exception that MXNet catches around a custom operator and turns into MXNetError. MXNet matches it by its name, so
// other libraries must see the symbol.
struct __attribute__((visibility("default"))) Error : public std::runtime_error {
    explicit Error(const std::string& what) : std::runtime_error(what) {}
};
}  // namespace dmlc

namespace syncbn {

// How the text of a failed step begins: MXNet makes an exception of the kind that is registered under the name before
// the colon (`get_last_ffi_error` in python/mxnet/base.py).
constexpr char kStepError[] = "gluon_syncbn.StepError: ";

// An error with this text, or with another one if there is no memory for it.
inline dmlc::Error error_with(const char* text, const char* kind = "") noexcept {
    static const dmlc::Error no_memory(std::string(kStepError) + "no memory is left, not even to say what has failed");
    try {
        return dmlc::Error(std::string(kind) + text);
    } catch (const std::bad_alloc&) {
        return no_memory;  // copies share their text
    }
}

// MXNet's library, a handle of dlopen; null before `find_in`.
inline void* mxnet_library = nullptr;
// A function, which converts to the type of its pointer; it may be null.
struct Function {
    void* address;
    template <typename F>
    operator F*() const {
        return reinterpret_cast<F*>(address);
    }
};
// Finds a function of MXNet's or of a library that it is linked against.
inline Function find(const char* name) { return {mxnet_library == nullptr ? nullptr : dlsym(mxnet_library, name)}; }

// The same, of one that the layer cannot do without. Throws if the library, once it is known, lacks it.
inline Function needed(const char* name) {
    const Function found = find(name);
    if (mxnet_library != nullptr && found.address == nullptr)
        throw std::runtime_error(std::string("this MXNet lacks a function that the layer calls: ") + name);
    return found;
}

// All but the first return 0 or fail.
struct MXNet {
    const char* (*MXGetLastError)() = needed("MXGetLastError");
    int (*MXCustomOpRegister)(const char* op_type, CustomOpPropCreator creator) = needed("MXCustomOpRegister");
    int (*MXAutogradIsTraining)(bool* training) = needed("MXAutogradIsTraining");
    int (*MXAutogradIsRecording)(bool* recording) = needed("MXAutogradIsRecording");
    int (*MXNDArrayGetData)(void* handle, void** data) = needed("MXNDArrayGetData");
    int (*MXNDArrayFree)(void* handle) = needed("MXNDArrayFree");
    int (*MXEnginePushSyncND)(void (*run)(void* context, void* parameter), void* parameter,
                              void (*deleter)(void* parameter), const void* context, void** reads, int read_count,
                              void** writes, int write_count, const void* property, int priority,
                              const char* name) = needed("MXEnginePushSyncND");
    // The function calls `complete` later.
    int (*MXEnginePushAsyncND)(void (*run)(void* context, void* complete, void* parameter), void* parameter,
                               void (*deleter)(void* parameter), const void* context, void** reads, int read_count,
                               void** writes, int write_count, const void* property, int priority, const char* name,
                               bool wait) = needed("MXEnginePushAsyncND");
    int (*MXShallowCopyNDArray)(void* handle, void** out) = needed("MXShallowCopyNDArray");  // a handle of its own
};
inline MXNet mx;  // empty until `register`

const struct {
    int device_type, device_id;
} kCpu{1, 0};
// FnProperty::kNoSkip: runs although an operation that it waits for has failed, and is never bundled.
const int kNoSkip = 7;
// Has MXNet's engine call `work` when these arrays are available. MXNet deletes it when it has noted what that throws.
// Returns MXNet's status.
template <typename Work>
int push(Work work, const Span<void*>& reads, const Span<void*>& writes) {
    const auto run = [](void*, void* work) { (*static_cast<Work*>(work))(); };
    const auto remove = [](void* work) { delete static_cast<Work*>(work); };
    return mx.MXEnginePushSyncND(run, new Work(std::move(work)), remove, &kCpu, reads.values,
                                 static_cast<int>(reads.count), writes.values, static_cast<int>(writes.count), &kNoSkip,
                                 0, "gluon_syncbn");
}

// What MXNet's engine finds in the environment: whether it runs each operator in the thread that issues it, and whether it
// bundles operators. Read before the first operators run, and not by a thread of the engine's: meanwhile, the user's thread
// may write to the environment.
inline std::atomic<bool> is_naive_engine{false}, bundles_operators{true};
inline void read_environment() {
    const char *type = std::getenv("MXNET_ENGINE_TYPE"), *bundles = std::getenv("MXNET_EXEC_BULK_EXEC_TRAIN");
    is_naive_engine = type != nullptr && std::strcmp(type, "NaiveEngine") == 0;
    bundles_operators = bundles == nullptr || std::atoi(bundles) != 0;
}

}  // namespace syncbn

// Wraps MXNet's library, if its C++ side is known.
#pragma once

#include <dlfcn.h>

#include <cstring>
#include <string>

#include "native/abi.h"

namespace syncbn {
namespace native {

struct Library {
    const ComputeMap& (*computes)(const void* name);
    Op& (*set_compute)(Op* op, const void* name, const Compute& compute, int priority);
    Op& (*set_flag)(Op* op, const void* name, const bool& value, int priority);
    int (*find_op)(const char* name, Op** op);
    void (*copy)(NDArray* out, const NDArray* from);
    void (*destroy)(NDArray* array);
    NDArray* (*reorder)(NDArray* out, const NDArray* from);          // to plain; `out` is empty before
    void* (*lay_out)(NDArray* array, const Descriptor* descriptor);  // null for a view
    bool (*is_blocked)(const Chunk* chunk);
    void (*reorder_chunk)(Chunk* chunk);  // to plain, in place
    void* (*stream)();                    // oneDNN's, of this thread
    void (*submit)(void* stream, bool clean_up);
};

// Finds a symbol by its name in a library. Returns whether it is there.
template <typename F>
bool find(void* handle, const char* name, F* out) {
    void* symbol = dlsym(handle, name);
    std::memcpy(out, &symbol, sizeof symbol);
    return symbol != nullptr;
}

// What `open` has found, by a handle of dlopen of a known library.
extern Library library;
void open(void* handle);

}  // namespace native
}  // namespace syncbn

// The few declarations of MXNet's C interface that a custom operator needs. They are a stable ABI, and having them
// here keeps MXNet out of the build: the functions themselves come from the library that Python has loaded.
#pragma once

#include <stdexcept>
#include <string>

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
// What MXNet catches around a custom operator and turns into MXNetError. It is matched by its name, so it must be
// visible to other libraries.
struct __attribute__((visibility("default"))) Error : public std::runtime_error {
    explicit Error(const std::string& what) : std::runtime_error(what) {}
};
}  // namespace dmlc

namespace syncbn {

// Handed over by `_native.py` before the operator is registered.
struct MXNet {
    int (*custom_op_register)(const char* op_type, CustomOpPropCreator creator);
    int (*ndarray_get_data)(void* handle, void** data);
    int (*ndarray_free)(void* handle);
    int (*autograd_is_training)(bool* training);
};
extern MXNet mx;

}  // namespace syncbn

// Defines the tensor of a call, its slots and their statistics.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "failure.h"
#include "mxnet_api.h"
#include "types.h"

namespace syncbn {

// The statistic of a pool, on the host.
struct Statistic {
    double count;
    Vector mean, variance, invstd;  // [channels]
};

// A virtual device: a contiguous part of this replica's batch.
struct Slot {
    Shape shape;
    int64_t first;  // index of its first value in the tensor
    // The statistics of the pool that it feeds, and of the pool that normalises it. Null for a slot without values. A slot
    // whose values are all masked feeds no pool, and zeros may normalise it.
    std::shared_ptr<const Statistic> fed, used;
};

// The tensor of a call, and its slots.
struct Tensor {
    Type type;
    Shape shape;
    int64_t samples;  // equal parts of shape.outer
    Mask mask;        // its layout, if there is one
    std::vector<Slot> slots;

    Type parameter_type() const { return parameter_type_of(type); }
    // Splits as numpy.array_split does: the first slots get one sample more if the number does not divide the samples.
    void cut(int64_t count) {
        slots.clear();
        const int64_t per_sample = samples == 0 ? 0 : shape.outer / samples;
        int64_t sample = 0;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t size = samples / count + (i < samples % count);
            Shape part = shape;
            part.outer = size * per_sample;
            slots.push_back({part, sample * per_sample * shape.channels * shape.inner, nullptr, nullptr});
            sample += size;
        }
    }
};

// An array that lives on the device.
struct Array {
    void* handle = nullptr;  // MXNet's; null if an operator gets none
    void* values = nullptr;  // their address, if known without asking MXNet
};

// Returns the address of the values. Throws Failure.
inline void* data(Array array) {
    if (array.values != nullptr) return array.values;
    void* out = nullptr;
    if (mx.MXNDArrayGetData(array.handle, &out) == 0) return out;
    const std::string error = mx.MXGetLastError();
    throw Failure("MXNet gave no memory for an array: " + error.substr(0, error.find('\n')));  // a stack trace follows
}
template <typename T>
T* data(Array array) {
    return static_cast<T*>(data(array));
}

}  // namespace syncbn

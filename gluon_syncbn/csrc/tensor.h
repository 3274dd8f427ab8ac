// The tensor of a call, its slots and their statistics.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "types.h"

namespace syncbn {

// A pool's. The vectors are empty where a device keeps them.
struct Statistic {
    double count;
    Vector mean, variance, invstd;  // [channels]
    bool constant(size_t channel) const { return variance[channel] * invstd[channel] * invstd[channel] <= kConstant; }
};

// A virtual device: a contiguous part of this replica's batch.
struct Slot {
    Shape shape;
    int64_t first;  // of its values in the tensor
    // Of the pool that its values feed, and of the one that it is normalised with. Null for a slot without values.
    std::shared_ptr<const Statistic> fed, used;
};

// The tensor of a call, and how it is cut into slots.
struct Tensor {
    Type type;
    Shape shape;
    int64_t samples;  // equal parts of shape.outer
    std::vector<Slot> slots;

    Type parameter_type() const { return parameter_type_of(type); }
    // As numpy.array_split: the first slots get one sample more where they cannot all have the same number.
    void cut(int64_t count);
    // So many channels lie next to each other, here and in the slots: see `Shape`.
    void lay_out(int64_t block);
};

// An array that lives on the device.
struct Array {
    void* handle = nullptr;  // MXNet's; null where an operator gets none
    void* values = nullptr;  // where they are, where MXNet need not be asked for that
};

// Where its values are. Throws Failure.
void* data(Array array);
template <typename T>
T* data(Array array) {
    return static_cast<T*>(data(array));
}

// z = gamma * xhat + beta, where gamma, where it is fixed, counts as 1; and what stands behind it.
struct Affine {
    Array gamma, beta;
    bool fix_gamma;
    Activation activation;
};

}  // namespace syncbn

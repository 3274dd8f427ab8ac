// What one call asks of its device: whole tensors in MXNet's arrays, statistics in plain vectors.
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
    Vector mean, invstd;  // [channels]
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

    Type parameter_type() const { return type == Type::kFloat64 ? Type::kFloat64 : Type::kFloat32; }
    // As numpy.array_split: the first slots get one sample more where they cannot all have the same number.
    void cut(int64_t count);
};

// MXNet's handle of an array that lives on the device.
using Array = void*;

// gamma * x + beta; where gamma is fixed it counts as 1.
struct Affine {
    Array gamma, beta;
    bool fix_gamma;
};

// What flows back through the statistics: dx = gamma * invstd * (dy - mean_dy - (x - mean) * slope), with the mean of the
// pool that the slot feeds and the invstd of the one that it used. [slots][channels]
struct ThroughStatistics {
    Vector mean_dy, slope;
};

// On a GPU an operation may still run when its function returns; MXNet's engine knows, and orders what comes after.
class Backend {
  public:
    int threads = 1;  // of this process, for the CPU's kernels

    virtual ~Backend() = default;

    // [count, mean[C], m2[C]] of each slot, one after the other.
    virtual Vector moments(Array x, const Tensor& tensor) = 0;
    // What the running statistics stand for.
    virtual Statistic frozen(Array running_mean, Array running_var, const Tensor& tensor, double epsilon) = 0;
    // y = (x - mean) * invstd * gamma + beta with what each slot uses, added to y where `add`.
    virtual void normalise(Array x, const Tensor& tensor, const Affine& affine, Array y, bool add) = 0;
    // running <- momentum * running + (1 - momentum) * values
    virtual void update_running(const Vector& mean, const Vector& variance, double momentum, Type type,
                                Array running_mean, Array running_var) = 0;

    // [sum dy[C], sum dy*xhat[C]] of each slot, one after the other, with what it was normalised with.
    virtual Vector grad_sums(Array dy, Array x, const Tensor& tensor) = 0;
    virtual void grad_input(Array dy, Array x, const Tensor& tensor, const Affine& affine,
                            const ThroughStatistics& through, Array dx, bool add) = 0;

    // n values from one array into another, added where `add`.
    virtual void copy(Array from, Type type, int64_t n, Array to, bool add) = 0;
    // The n values of an array of float64.
    virtual Vector read(Array from, int64_t n) = 0;
    // Values into an array, added where `add`.
    virtual void write(const Vector& values, Type type, Array to, bool add) = 0;
    virtual void fill(Array to, Type type, int64_t n, double value) = 0;

    // For "cpu(0)" or "gpu(1)"; another kind of context is a Failure.
    static std::unique_ptr<Backend> of(const std::string& context);
};

std::unique_ptr<Backend> cpu_backend();
std::unique_ptr<Backend> cuda_backend(int device);

}  // namespace syncbn

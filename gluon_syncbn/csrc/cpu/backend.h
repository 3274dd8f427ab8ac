// Runs the CPU's kernels on MXNet's arrays: data is whole tensors, statistics are plain vectors.
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/kernels.h"
#include "tensor.h"
#include "types.h"

namespace syncbn {
namespace cpu {

// The gradient through the statistics: dx = gamma * invstd * (dz - mean_dz - (x - mean) * slope). The mean is that of
// the pool that the slot feeds, the invstd that of the pool that it used. [slots][channels]
struct ThroughStatistics {
    Vector mean_dz, slope;
};

// If y gives the sign of z, beta is not needed, and dz is written. Both pointers are null if the tensor is empty.
struct ByOutput {
    const void* y;
    void* dz;
};

class Backend {
  public:
    int threads = 1;  // of this process

    // Returns a mask as `Work` has it.
    std::vector<float> mask(const void* values, const Mask& layout) const;
    // Returns [count, mean[C], m2[C]] of each slot, one after the other. The mask may be null.
    Vector moments(Array x, const Tensor& tensor, const float* mask) const;
    // Returns the running statistics as a statistic.
    Statistic frozen(Array running_mean, Array running_var, const Tensor& tensor, double epsilon) const;
    // y = (x - mean) * invstd * gamma + beta [+ addend], then the activation, by each slot's statistic. Adds to y if
    // `add`.
    void normalise(Array x, const Tensor& tensor, const Affine& affine, const void* addend, Array y, bool add) const;
    // running <- momentum * running + (1 - momentum) * values
    void update_running(const Vector& mean, const Vector& variance, double momentum, Type type, Array running_mean,
                        Array running_var) const;

    // Returns [sum dz[C], sum dz*xhat[C]] of each slot, one after the other, with the statistic that normalised it. The
    // gradient dz is with respect to z of `Affine`.
    Vector grad_sums(const void* dy, const void* x, const Tensor& tensor, const Affine& affine,
                     const std::optional<ByOutput>& by_output) const;
    void grad_input(const void* dy, const void* x, const Tensor& tensor, const Affine& affine,
                    const ThroughStatistics& through, const float* mask, Array dx, bool add) const;
    // Computes x from the y of `normalise`.
    void recover(const void* y, const Tensor& tensor, const Affine& affine, void* x) const;
    // Returns the first channel where `recover` cannot find x.
    std::optional<Hidden> first_hidden(const Tensor& tensor, const Affine& affine) const;

    // Copies n values into an array, or adds them if `add`.
    void copy(const void* from, Type type, int64_t n, Array to, bool add) const;
    // Returns the n values of an array of float64.
    Vector read(Array from, int64_t n) const;
    // Writes values into an array, or adds them if `add`.
    void write(const Vector& values, Type type, Array to, bool add) const;
    void fill(Array to, Type type, int64_t n, double value) const;

  private:
    Work work(const Tensor& tensor, const Slot& slot, const float* mask = nullptr) const {
        if (mask != nullptr) mask += slot.first / tensor.shape.channels;
        return {tensor.type, slot.shape, threads, mask};
    }
};

}  // namespace cpu
}  // namespace syncbn

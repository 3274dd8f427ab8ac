// The CPU's kernels on MXNet's arrays: whole tensors there, statistics in plain vectors.
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/kernels.h"
#include "tensor.h"
#include "types.h"

namespace syncbn {
namespace cpu {

// What flows back through the statistics: dx = gamma * invstd * (dz - mean_dz - (x - mean) * slope), with the mean of the
// pool that the slot feeds and the invstd of the one that it used. [slots][channels]
struct ThroughStatistics {
    Vector mean_dz, slope;
};

// y tells the sign of z, which then needs no beta, and dz is written. Both pointers are null where the tensor is empty.
struct ByOutput {
    const void* y;
    void* dz;
};

class Backend {
  public:
    int threads = 1;  // of this process

    // [count, mean[C], m2[C]] of each slot, one after the other.
    Vector moments(Array x, const Tensor& tensor) const;
    // What the running statistics stand for.
    Statistic frozen(Array running_mean, Array running_var, const Tensor& tensor, double epsilon) const;
    // y = (x - mean) * invstd * gamma + beta [+ addend], rectified, with what each slot uses; added to y where `add`.
    void normalise(Array x, const Tensor& tensor, const Affine& affine, const void* addend, Array y, bool add) const;
    // running <- momentum * running + (1 - momentum) * values
    void update_running(const Vector& mean, const Vector& variance, double momentum, Type type, Array running_mean,
                        Array running_var) const;

    // [sum dz[C], sum dz*xhat[C]] of each slot, one after the other, with what it was normalised with: dz is the gradient
    // with respect to z of `Affine`.
    Vector grad_sums(const void* dy, const void* x, const Tensor& tensor, const Affine& affine,
                     const std::optional<ByOutput>& by_output) const;
    void grad_input(const void* dy, const void* x, const Tensor& tensor, const Affine& affine,
                    const ThroughStatistics& through, Array dx, bool add) const;
    // x of y, which `normalise` made of it.
    void recover(const void* y, const Tensor& tensor, const Affine& affine, void* x) const;
    // The first channel where that cannot be.
    std::optional<Hidden> first_hidden(const Tensor& tensor, const Affine& affine) const;

    // n values into an array, added where `add`.
    void copy(const void* from, Type type, int64_t n, Array to, bool add) const;
    // The n values of an array of float64.
    Vector read(Array from, int64_t n) const;
    // Values into an array, added where `add`.
    void write(const Vector& values, Type type, Array to, bool add) const;
    void fill(Array to, Type type, int64_t n, double value) const;

  private:
    Work work(const Tensor& tensor, const Slot& slot) const { return {tensor.type, slot.shape, threads}; }
};

}  // namespace cpu
}  // namespace syncbn

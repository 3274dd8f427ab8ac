// The layer's arithmetic on a CPU: five functions, each one pass over memory, on plain values and nothing of MXNet's.
// Statistics are float64 whatever the data is; results do not depend on the number of threads. All tensors of a call have the
// same shape and layout.
#pragma once

#include "types.h"

namespace syncbn {
namespace cpu {

// What to work on, and with how many threads.
struct Work {
    Type type;
    Shape shape;
    int threads;

    // No more than have enough to do.
    int useful_threads() const;
};

// z = (x - mean) * scale + shift, and what stands behind it: where that is nothing, scale and shift may be null for
// gradients. [channels] each.
struct Rectified {
    const double* mean;
    const double* scale;  // gamma / sqrt(variance + epsilon)
    const double* shift;  // beta
    Activation activation;
};

// y = z [+ addend], rectified; added to y where `add`.
struct Normalise {
    Rectified with;
    const void* addend;  // null: none
    bool add;
};

// What dz is: the gradient with respect to z. It is found by y where that is given, which it has to be where something was
// added; dz is then written. Otherwise z is computed from x.
struct GradSums {
    Rectified with;
    const double* invstd;
    const void* y;  // or null
    void* dz;       // where y is given
};

// dx = scale * (dz - mean_dz - (x - mean) * slope), added to dx where `add`, with dz from dy and x. [channels] each. dx may lie
// where x does.
struct GradInput {
    Rectified with;
    const double* mean;
    const double* mean_dz;  // over the pool
    const double* slope;    // mean of dz * xhat over the pool, times 1 / sqrt(variance + epsilon)
    bool add;
};

// mean[c] = mean of x over the channel, m2[c] = sum of (x - mean)^2; both 0 for an empty tensor.
void moments(const Work& work, const void* x, double* mean, double* m2);
void normalise(const Work& work, const void* x, const Normalise& with, void* y);
// sum_dz[c] = sum of dz, sum_dz_xhat[c] = sum of dz * (x - mean) * invstd.
void grad_sums(const Work& work, const void* dy, const void* x, const GradSums& with, double* sum_dz,
               double* sum_dz_xhat);
void grad_input(const Work& work, const void* dy, const void* x, const GradInput& with, void* dx);
// x of the y that `normalise` makes of it, where the activation is invertible and nothing was added.
void recover(const Work& work, const void* y, const Rectified& with, void* x);

// Instruction set that serves here: "avx512f", "avx2" or "baseline".
const char* instruction_set();

}  // namespace cpu
}  // namespace syncbn

// Declares the layer's arithmetic on a CPU: four functions, each one pass over memory, without types of MXNet's.
// Statistics are float64 for every type of data. Results do not depend on the number of threads. All tensors of a call
// have the same shape and layout.
#pragma once

#include "types.h"

namespace syncbn::cpu {

// The shape of the work, and the number of threads. Where `mask` is 0, a position does not count in `moments`. No
// gradient flows through these to it in `grad_input`. The other functions do not read the mask.
struct Work {
    Type type;
    Shape shape;
    int threads;
    const float* mask = nullptr;  // [outer][inner], in every layout; null: all count
};

// z = (x - mean) * scale + shift, then the activation. For gradients without an activation, scale and shift may be
// null. [channels] each.
struct Rectified {
    const double* mean;
    const double* scale;  // gamma / sqrt(variance + epsilon)
    const double* shift;  // beta
    Activation activation;
};

// How to find dz, the gradient with respect to z. If y is given, dz is found from y and written; an addition requires
// this. Otherwise z is computed from x.
struct GradSumsArguments {
    Rectified with;
    const double* invstd;
    const void* y;  // or null
    void* dz;       // if y is given
};

// dx = scale * (dz - mean_dz - (x - mean) * slope), added to dx if `add`, with dz from dy and x. [channels] each.
struct GradInputArguments {
    Rectified with;
    const double* mean;
    const double* mean_dz;  // over the pool
    const double* slope;    // mean of dz * xhat over the pool, times 1 / sqrt(variance + epsilon)
    bool add;
};

// mean[c] = mean of x over the channel, m2[c] = sum of (x - mean)^2; both 0 without a position that counts. Returns the
// number of these.
int64_t moments(const Work& work, const void* x, double* mean, double* m2);
// y = z [+ addend], after the activation. `addend`: null for none.
void normalise(const Work& work, const void* x, const Rectified& with, const void* addend, void* y);
// sum_dz[c] = sum of dz, sum_dz_xhat[c] = sum of dz * (x - mean) * invstd.
void grad_sums(const Work& work, const void* dy, const void* x, const GradSumsArguments& with, double* sum_dz,
               double* sum_dz_xhat);
void grad_input(const Work& work, const void* dy, const void* x, const GradInputArguments& with, void* dx);

// The instruction set of this machine's kernels: "avx512f", "avx2" or "baseline".
const char* instruction_set();

}  // namespace syncbn::cpu

// The layer's arithmetic on a CPU: four functions, each one pass over memory, on plain values and nothing of MXNet's.
// Statistics are float64 whatever the data is; results do not depend on the number of threads.
#pragma once

#include "types.h"

namespace syncbn {
namespace cpu {

// What to work on, and with how many threads.
struct Work {
    Type type;
    Shape shape;
    int threads;
};

// y = (x - mean) * scale + shift, added to y where `add`. [channels] each.
struct Normalise {
    const double* mean;
    const double* scale;  // gamma / sqrt(variance + epsilon)
    const double* shift;  // beta
    bool add;
};

// dx = scale * (dy - mean_dy - (x - mean) * slope), added to dx where `add`. [channels] each.
struct GradInput {
    const double* mean;
    const double* scale;    // gamma / sqrt(variance + epsilon)
    const double* mean_dy;  // over the pool
    const double* slope;    // mean of dy * xhat over the pool, times 1 / sqrt(variance + epsilon)
    bool add;
};

// mean[c] = mean of x over the channel, m2[c] = sum of (x - mean)^2; both 0 for an empty tensor.
void moments(const Work& work, const void* x, double* mean, double* m2);
void normalise(const Work& work, const void* x, const Normalise& with, void* y);
// sum_dy[c] = sum of dy, sum_dy_xhat[c] = sum of dy * (x - mean) * invstd.
void grad_sums(const Work& work, const void* dy, const void* x, const double* mean, const double* invstd,
               double* sum_dy, double* sum_dy_xhat);
void grad_input(const Work& work, const void* dy, const void* x, const GradInput& with, void* dx);

// Instruction set that serves here: "avx512f", "avx2" or "baseline".
const char* instruction_set();

}  // namespace cpu
}  // namespace syncbn

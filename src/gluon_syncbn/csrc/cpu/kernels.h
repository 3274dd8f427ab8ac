// What a device can do for the layer: four functions on plain values. Each is one pass over memory.
// Statistics are float64 whatever the data is; results do not depend on `threads`.
#pragma once

#include "types.h"

namespace syncbn {
namespace cpu {

// mean[c] = mean of x over the channel, m2[c] = sum of (x - mean)^2; both 0 for an empty tensor.
void moments(const void* x, Type type, Shape shape, int threads,
             double* mean,  // [channels]
             double* m2);   // [channels]

// y = (x - mean) * scale + shift, added to y where `add`.
void normalise(const void* x, Type type, Shape shape, int threads,
               const double* mean,   // [channels]
               const double* scale,  // [channels] gamma / sqrt(variance + epsilon)
               const double* shift,  // [channels] beta
               void* y, bool add);

// sum_dy[c] = sum of dy, sum_dy_xhat[c] = sum of dy * (x - mean) * invstd.
void grad_sums(const void* dy, const void* x, Type type, Shape shape, int threads,
               const double* mean,    // [channels]
               const double* invstd,  // [channels]
               double* sum_dy,        // [channels]
               double* sum_dy_xhat);  // [channels]

// dx = scale * (dy - mean_dy - (x - mean) * slope), added to dx where `add`.
void grad_input(const void* dy, const void* x, Type type, Shape shape, int threads,
                const double* mean,     // [channels]
                const double* scale,    // [channels] gamma * invstd
                const double* mean_dy,  // [channels] over all replicas
                const double* slope,    // [channels] mean of dy * xhat over all replicas, times invstd
                void* dx, bool add);

// Instruction set that serves here: "avx512f", "avx2" or "baseline".
const char* instruction_set();

}  // namespace cpu
}  // namespace syncbn

// Declares the kernels of kernels.h for float32 and bfloat16 in blocks of 8 or 16 neighbouring channels.
#pragma once

#include "cpu/kernels.h"

namespace syncbn {
namespace cpu {
namespace blocked {

int64_t moments(const Work& work, const void* x, double* mean, double* m2);
void normalise(const Work& work, const void* x, const Normalise& with, void* y);
void grad_sums(const Work& work, const void* dy, const void* x, const GradSums& with, double* sum_dz,
               double* sum_dz_xhat);
void grad_input(const Work& work, const void* dy, const void* x, const GradInput& with, void* dx);
void recover(const Work& work, const void* y, const Rectified& with, void* x);

}  // namespace blocked
}  // namespace cpu
}  // namespace syncbn

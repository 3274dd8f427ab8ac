// Declares the kernels of kernels.h for float32 in blocks of 8 or 16 neighbouring channels.
#pragma once

#include "cpu/kernels.h"

namespace syncbn {
namespace cpu {
namespace blocked {

void moments(const Work& work, const float* x, double* mean, double* m2);
void normalise(const Work& work, const float* x, const Normalise& with, float* y);
void grad_sums(const Work& work, const float* dy, const float* x, const GradSums& with, double* sum_dz,
               double* sum_dz_xhat);
void grad_input(const Work& work, const float* dy, const float* x, const GradInput& with, float* dx);
void recover(const Work& work, const float* y, const Rectified& with, float* x);

}  // namespace blocked
}  // namespace cpu
}  // namespace syncbn

// The four kernels and the half conversions behind C names, for tests/test_kernels.py.
#include "cpu/half.h"
#include "cpu/kernels.h"

using syncbn::Shape;
using syncbn::Type;
using syncbn::cpu::Work;

extern "C" {
void moments(const void* x, int type, int64_t outer, int64_t channels, int64_t inner, int threads, double* mean,
             double* m2) {
    syncbn::cpu::moments(Work{Type(type), Shape{outer, channels, inner}, threads}, x, mean, m2);
}
void normalise(const void* x, int type, int64_t outer, int64_t channels, int64_t inner, int threads, const double* mean,
               const double* scale, const double* shift, double slope, double ceiling, const void* addend, void* y,
               int add) {
    syncbn::cpu::normalise(Work{Type(type), Shape{outer, channels, inner}, threads}, x,
                           {{mean, scale, shift, {slope, ceiling}}, addend, add != 0}, y);
}
void grad_sums(const void* dy, const void* x, int type, int64_t outer, int64_t channels, int64_t inner, int threads,
               const double* mean, const double* scale, const double* shift, double slope, double ceiling,
               const double* invstd, const void* y, void* dz, double* sum_dz, double* sum_dz_xhat) {
    syncbn::cpu::grad_sums(Work{Type(type), Shape{outer, channels, inner}, threads}, dy, x,
                           {{mean, scale, shift, {slope, ceiling}}, invstd, y, dz}, sum_dz, sum_dz_xhat);
}
void grad_input(const void* dy, const void* x, int type, int64_t outer, int64_t channels, int64_t inner, int threads,
                const double* mean, const double* scale, const double* shift, double z_slope, double ceiling,
                const double* fed_mean, const double* mean_dz, const double* slope, void* dx, int add) {
    syncbn::cpu::grad_input(Work{Type(type), Shape{outer, channels, inner}, threads}, dy, x,
                            {{mean, scale, shift, {z_slope, ceiling}}, fed_mean, mean_dz, slope, add != 0}, dx);
}
void to_half(const float* values, int64_t n, uint16_t* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = syncbn::float_to_half(values[i]);
}
void from_half(const uint16_t* values, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = syncbn::half_to_float(values[i]);
}
}

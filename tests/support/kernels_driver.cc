// The four kernels behind C names, for tests/unit/test_kernels.py.
#include "cpu/kernels.h"

using syncbn::Shape;
using syncbn::Type;
using syncbn::cpu::Work;

// Of the calls that follow; null: none.
static const float* mask = nullptr;

extern "C" {
void take_mask(const float* values) { mask = values; }
int64_t moments(const void* x, int type, int64_t outer, int64_t channels, int64_t inner, int64_t block, int threads,
                double* mean, double* m2) {
    return syncbn::cpu::moments(Work{Type(type), Shape{outer, channels, inner, block}, threads, mask}, x, mean, m2);
}
void normalise(const void* x, int type, int64_t outer, int64_t channels, int64_t inner, int64_t block, int threads,
               const double* mean, const double* scale, const double* shift, double slope, double ceiling,
               const void* addend, void* y) {
    syncbn::cpu::normalise(Work{Type(type), Shape{outer, channels, inner, block}, threads}, x,
                           {mean, scale, shift, {slope, ceiling}}, addend, y);
}
void grad_sums(const void* dy, const void* x, int type, int64_t outer, int64_t channels, int64_t inner, int64_t block,
               int threads, const double* mean, const double* scale, const double* shift, double slope, double ceiling,
               const double* invstd, const void* y, void* dz, double* sum_dz, double* sum_dz_xhat) {
    syncbn::cpu::grad_sums(Work{Type(type), Shape{outer, channels, inner, block}, threads}, dy, x,
                           {{mean, scale, shift, {slope, ceiling}}, invstd, y, dz}, sum_dz, sum_dz_xhat);
}
void grad_input(const void* dy, const void* x, int type, int64_t outer, int64_t channels, int64_t inner, int64_t block,
                int threads, const double* mean, const double* scale, const double* shift, double z_slope,
                double ceiling, const double* fed_mean, const double* mean_dz, const double* slope, void* dx, int add) {
    syncbn::cpu::grad_input(Work{Type(type), Shape{outer, channels, inner, block}, threads, mask}, dy, x,
                            {{mean, scale, shift, {z_slope, ceiling}}, fed_mean, mean_dz, slope, add != 0}, dx);
}
}

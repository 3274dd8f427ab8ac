// Packed float64 vectors that replicas exchange, and how two become one.
//
//   moments  [count, mean[C], m2[C]]       safe for any offset of the data
//   grads    [sum dy[C], sum dy*xhat[C]]
//
// Where slots keep statistics of their own, a replica hands in one such part per slot, in order, and gets those of all
// replicas, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace syncbn {

using Vector = std::vector<double>;

// Both of 1 + 2 * channels values.
void merge_moments(double* total, const double* part, int64_t channels);
void add_to(double* total, const Vector& part);

}  // namespace syncbn

// Packed float64 vectors that replicas exchange, and how two become one.
//
//   moments  [count, mean[C], m2[C]]                 inside the process: safe for any offset
//   sums     [count, sum[C], sum of squares[C]]      what can be added by anybody else
//   grads    [sum dy[C], sum dy*xhat[C]]
//
// Where slots keep statistics of their own, a replica hands in one such part per slot, in order, and gets those of all
// replicas, in order.
#pragma once

#include <vector>

namespace syncbn {

using Vector = std::vector<double>;

void merge_moments(Vector* total, const Vector& part);
void add_to(double* total, const Vector& part);
// Adds the sums that `moments` stands for to a row of the same length.
void add_as_sums(double* row, const Vector& moments);
Vector moments_from_sums(Vector sums);

}  // namespace syncbn

// Combines packed float64 vectors.
//
//   moments    [count, mean[C], m2[C]]       m2 is the sum of (x - mean)^2: safe for any offset of the data
//   gradients  [sum dy[C], sum dy*xhat[C]]
#pragma once

#include <cstdint>

#include "types.h"

namespace syncbn {

inline int64_t moments_length(int64_t channels) { return 1 + 2 * channels; }
inline int64_t gradients_length(int64_t channels) { return 2 * channels; }

void merge_moments(double* total, const double* part, int64_t channels);
// The index of the first value that is not finite; -1 if all are finite.
int64_t first_not_finite(const Vector& values);

// The moments of all values, or the sum of the vectors.
enum class Combine { kMerge, kAdd };
// Combines `part` into `total`, which begins as zeros.
void put(Combine combine, double* total, const double* part, size_t length);

}  // namespace syncbn

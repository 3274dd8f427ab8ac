// Combines packed float64 vectors.
//
//   moments    [count, mean[C], m2[C]]       m2 is the sum of (x - mean)^2: safe for any offset of the data
//   gradients  [sum dy[C], sum dy*xhat[C]]
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "types.h"

namespace syncbn {

inline int64_t moments_length(int64_t channels) { return 1 + 2 * channels; }
inline int64_t gradients_length(int64_t channels) { return 2 * channels; }

// Chan, Golub, LeVeque (1979): computes n, mean and sum of squared deviations of two sets from those of each.
inline void merge_moments(double* total, const double* part, int64_t channels) {
    const double n = total[0], m = part[0];
    if (m == 0) return;
    double *mean = total + 1, *m2 = mean + channels;
    const double *other_mean = part + 1, *other_m2 = other_mean + channels;
    for (int64_t c = 0; c < channels; ++c) {
        const double delta = other_mean[c] - mean[c];
        mean[c] += delta * (m / (n + m));
        m2[c] += other_m2[c] + delta * delta * (n * m / (n + m));
    }
    total[0] = n + m;
}

// The index of the first value that is not finite; -1 if all are finite.
inline int64_t first_not_finite(const Vector& values) {
    const auto found = std::find_if(values.begin(), values.end(), [](double value) { return !std::isfinite(value); });
    return found == values.end() ? -1 : found - values.begin();
}

// The moments of all values, the sum of the vectors, or the vectors themselves.
enum class Combine { kMerge, kAdd, kSideBySide };
// Merges or adds `part` into `total`, which begins as zeros or as another part.
inline void put(Combine combine, double* total, const double* part, size_t length) {
    if (combine == Combine::kMerge) return merge_moments(total, part, static_cast<int64_t>(length / 2));
    for (size_t i = 0; i < length; ++i) total[i] += part[i];
}

}  // namespace syncbn

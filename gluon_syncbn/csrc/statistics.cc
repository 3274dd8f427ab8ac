#include "statistics.h"

#include <algorithm>

namespace syncbn {

// Chan, Golub, LeVeque (1979): n, mean and sum of squared deviations of two sets from those of each.
void merge_moments(Vector* total, const Vector& part) {
    const size_t channels = (total->size() - 1) / 2;
    const double n = (*total)[0], m = part[0];
    if (m == 0) return;
    double *mean = total->data() + 1, *m2 = mean + channels;
    const double *other_mean = part.data() + 1, *other_m2 = other_mean + channels;
    for (size_t c = 0; c < channels; ++c) {
        const double delta = other_mean[c] - mean[c];
        mean[c] += delta * (m / (n + m));
        m2[c] += other_m2[c] + delta * delta * (n * m / (n + m));
    }
    (*total)[0] = n + m;
}

void add_to(double* total, const Vector& part) {
    for (size_t i = 0; i < part.size(); ++i) total[i] += part[i];
}

void add_as_sums(double* row, const Vector& moments) {
    const size_t channels = (moments.size() - 1) / 2;
    const double n = moments[0];
    row[0] += n;
    for (size_t c = 1; c <= channels; ++c) {
        row[c] += n * moments[c];
        row[c + channels] += moments[c + channels] + n * moments[c] * moments[c];
    }
}

Vector moments_from_sums(Vector sums) {
    const size_t channels = (sums.size() - 1) / 2;
    const double n = sums[0];
    if (n == 0) return sums;
    for (size_t c = 1; c <= channels; ++c) {
        sums[c] /= n;
        const double m2 = sums[c + channels] - n * sums[c] * sums[c];
        sums[c + channels] = m2 < 0 ? 0 : m2;  // rounding; a NaN stays
    }
    return sums;
}

}  // namespace syncbn

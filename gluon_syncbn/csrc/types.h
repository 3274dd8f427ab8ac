// Plain values that the operator, the meetings and every kernel share.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace syncbn {

using Vector = std::vector<double>;

// MXNet's own type flags, so that no table translates them.
enum class Type : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2 };

inline int64_t size_of(Type type) { return type == Type::kFloat64 ? 8 : type == Type::kFloat32 ? 4 : 2; }

inline const char* name_of(Type type) {
    return type == Type::kFloat64 ? "float64" : type == Type::kFloat32 ? "float32" : "float16";
}

// What stands behind a normalisation: z where z > 0, but at most `ceiling`, else slope * z. A slope of 1 leaves it as it is,
// 0 is ReLU; a ceiling is for ReLU only.
struct Activation {
    double slope = 1, ceiling = std::numeric_limits<double>::infinity();
    bool any() const { return slope != 1; }
};

// Which gammas let xhat be found again, to a 32nd of a standard deviation, from what `type` keeps of gamma * xhat + beta.
struct Invertible {
    double per_beta, least;
    bool operator()(double gamma, double beta) const { return std::abs(gamma) > per_beta * std::abs(beta) + least; }
};
inline Invertible invertible_by(Type type) {
    if (type == Type::kFloat64) return {32 * 0x1p-53, 32 * std::numeric_limits<double>::min()};
    if (type == Type::kFloat32) return {32 * 0x1p-24, 32 * std::numeric_limits<float>::min()};
    return {32 * 0x1p-11, 32 * 0x1p-24};
}

// A tensor of 2 to 5 dimensions seen from its channel axis: [outer][channels][inner], row-major.
// Channels-first has inner = product of the spatial extents, channels-last has inner = 1.
// oneDNN's float32 may be in blocks of 8 or 16 channels that lie next to each other: [outer][channels / block][inner][block].
struct Shape {
    int64_t outer;
    int64_t channels;
    int64_t inner;
    int64_t block = 1;  // a divisor of the channels

    int64_t per_channel() const { return outer * inner; }
    int64_t size() const { return outer * channels * inner; }
};

}  // namespace syncbn

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

// What `type` keeps of gamma * xhat + beta, or of `slope` times that, says xhat to (per_beta * beta + least) / gamma of a 32nd of
// a standard deviation; and what it keeps of xhat itself adds as much per xhat as per beta.
struct Invertible {
    double per_beta, least;
    // xhat is found to a 32nd of a deviation.
    bool operator()(double gamma, double beta) const { return std::abs(gamma) > per_beta * std::abs(beta) + least; }
    // x is not found to a 32nd of its slot's own deviation, where the slot is normalised with another statistic: one of
    // deviation `used`, whose mean is `apart` from the slot's. False for what is no number.
    bool hidden_by_another(double gamma, double beta, double own, double used, double apart) const {
        return std::abs(gamma) * own <=
               (per_beta * std::abs(beta) + least) * used + per_beta * std::abs(gamma) * std::abs(apart);
    }
};
inline Invertible invertible_by(Type type, double slope) {
    if (type == Type::kFloat64) return {32 * 0x1p-53, 32 * std::numeric_limits<double>::min() / slope};
    if (type == Type::kFloat32) return {32 * 0x1p-24, 32 * std::numeric_limits<float>::min() / slope};
    return {32 * 0x1p-11, 32 * 0x1p-24 / slope};
}
// Of a slot whose values lie closer together than that part of its variance and epsilon, x is the mean.
constexpr double kConstant = 0x1p-48;

// A channel whose x cannot be found from y: because of its gamma, or of another slot's statistic that a slot is normalised with.
struct Hidden {
    int64_t channel;
    bool by_another;
};

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

// Defines plain values that the operator, the meetings and every kernel share.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "activation.h"
#include "plain.h"

namespace syncbn {

using Vector = std::vector<double>;

// Values side by side, as Python passes a list of them.
template <typename T>
struct Span {
    int64_t count = 0;
    T* values = nullptr;
    T* begin() const { return values; }
    T* end() const { return values + count; }
    operator std::vector<std::remove_const_t<T>>() const { return {begin(), end()}; }
};

// The types of data, by MXNet's own flags.
enum class Type : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBfloat16 = 12 };

// All of MXNet's types by their flags, also those that no data has.
constexpr struct {
    const char* name;
    int bytes, floating;
} kTypes[] = {{"float32", 4, 1}, {"float64", 8, 1}, {"float16", 2, 1}, {"uint8", 1, 0}, {"int32", 4, 0},
              {"int8", 1, 0},    {"int64", 8, 0},   {"bool", 1, 0},    {"int16", 2, 0}, {"uint16", 2, 0},
              {"uint32", 4, 0},  {"uint64", 8, 0},  {"bfloat16", 2, 1}};
inline int64_t size_of(Type type) { return kTypes[static_cast<int>(type)].bytes; }
inline const char* name_of(Type type) { return kTypes[static_cast<int>(type)].name; }
// The type of parameters and running statistics.
inline Type parameter_type_of(Type data) { return data == Type::kFloat64 ? Type::kFloat64 : Type::kFloat32; }

// The activation after a normalisation: a `Rectifier` of activation.h or, if there is not any, `Identity`.
struct Activation {
    double slope = 1, ceiling = std::numeric_limits<double>::infinity();
    bool any() const { return slope != 1; }
};

// A tensor of 2 to 5 dimensions seen from its channel axis: [outer][channels][inner], row-major. For channels-first,
// inner is the product of the spatial extents; for channels-last it is 1. Float32 and bfloat16 in oneDNN's layout may
// be in blocks of 8 or 16 neighbouring channels: [outer][channels / block][inner][block].
struct Shape {
    int64_t outer;
    int64_t channels;
    int64_t inner;
    int64_t block = 1;  // a divisor of the channels

    int64_t per_channel() const { return outer * inner; }
    int64_t size() const { return outer * channels * inner; }
};

}  // namespace syncbn

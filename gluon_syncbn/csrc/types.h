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

// MXNet computes with some on CPUs only.
struct TypeOfData {
    Type type;
    const char* name;
    int64_t bytes;
    bool on_gpus;
};
constexpr TypeOfData kTypesOfData[] = {{Type::kBfloat16, "bfloat16", 2, false},
                                       {Type::kFloat16, "float16", 2, true},
                                       {Type::kFloat32, "float32", 4, true},
                                       {Type::kFloat64, "float64", 8, true}};
// Returns null for an unknown flag.
inline const TypeOfData* type_of_data(int flag) {
    for (const TypeOfData& of : kTypesOfData)
        if (static_cast<int>(of.type) == flag) return &of;
    return nullptr;
}
inline const TypeOfData& type_of_data(Type type) { return *type_of_data(static_cast<int>(type)); }
inline int64_t size_of(Type type) { return type_of_data(type).bytes; }
inline const char* name_of(Type type) { return type_of_data(type).name; }
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

// Plain values that the operator, the rendezvous and every kernel share.
#pragma once

#include <cstdint>

namespace syncbn {

// MXNet's own type flags, so that no table translates them.
enum class Type : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2 };

inline int64_t size_of(Type type) { return type == Type::kFloat64 ? 8 : type == Type::kFloat32 ? 4 : 2; }

inline const char* name_of(Type type) {
    return type == Type::kFloat64 ? "float64" : type == Type::kFloat32 ? "float32" : "float16";
}

// Whose statistics a slot is normalised with. A slot is one virtual device: a contiguous part of a replica's batch.
enum class Mode : int { kSync = 0, kLocal = 1, kShuffle = 2 };

struct Pooling {
    Mode mode = Mode::kSync;
    int64_t slots = 1;  // per replica; in `sync` they change nothing
    int64_t group = 0;  // replicas that share a statistic in `sync`; 0 is all
};

// A tensor of 2 to 5 dimensions seen from its channel axis: [outer][channels][inner], row-major.
// Channels-first has inner = product of the spatial extents, channels-last has inner = 1.
struct Shape {
    int64_t outer;
    int64_t channels;
    int64_t inner;

    int64_t per_channel() const { return outer * inner; }
    int64_t size() const { return outer * channels * inner; }
};

}  // namespace syncbn

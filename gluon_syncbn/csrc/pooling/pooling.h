// Which slots share a statistic, whose a slot is normalised with, and what flows back to whom: the words are those of
// reference.py. Functions on numbers; nothing here knows of threads, layers or arrays.
//
// A slot is a virtual device: a contiguous part of a replica's batch. Slots are numbered over all replicas, in order. A
// pool is a statistic, of the slots whose values feed it.
//
//     mode      a pool is                                            a slot is normalised with
//     sync      all slots of the replicas, or of `group` of them     the pool that it feeds
//     local     one slot                                             the pool that it feeds
//     shuffle   one slot                                             the pool of another slot
#pragma once

#include <cstdint>
#include <vector>

#include "pooling/permutation.h"
#include "types.h"

namespace syncbn {

enum class Mode : int { kSync = 0, kLocal = 1, kShuffle = 2 };

struct Pooling {
    Mode mode = Mode::kSync;
    int64_t virtual_devices = 1;  // slots of a replica; in `sync` they change nothing
    int64_t group = 0;            // replicas that share a statistic in `sync`; 0 is all

    // As many parts as a replica's batch has to be cut into.
    int64_t slots() const { return mode == Mode::kSync ? 1 : virtual_devices; }
};

// What a replica has to know of the slots of the others.
enum class Sharing {
    kNothing,  // their statistics are their own
    kTotal,    // all feed one pool: the moments of all slots, merged, and the gradients, added, are enough
    kEach      // those of each slot
};
Sharing sharing_of(const Pooling& pooling);

constexpr int64_t kNone = -1;

// Of each slot, the number of a pool; kNone where the slot holds no value and takes no part.
struct Pools {
    std::vector<int64_t> feeds;
    std::vector<int64_t> uses;
    // What the running statistics of the slot's replica go towards: the pool that the replica would feed if it had
    // values, kNone where nobody feeds it.
    std::vector<int64_t> tracks;
};

// `counts` has the number of values of each slot. Throws std::invalid_argument in `shuffle` where fewer than two slots
// hold a value.
Pools pools_of(const Pooling& pooling, const std::vector<double>& counts, const Draw& draw);

// The moments of a pool, from those of each slot [slots][1 + 2C].
Vector moments_of_pool(const Pools& pools, int64_t pool, const Vector& slots, int64_t channels);

// Of the slots that are normalised with a pool, the sum of their gradients, from those of each slot [slots][2C].
Vector gradients_of_pool(const Pools& pools, int64_t pool, const Vector& slots, int64_t channels);

}  // namespace syncbn

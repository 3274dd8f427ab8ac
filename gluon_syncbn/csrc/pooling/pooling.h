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

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pooling/permutation.h"
#include "pooling/range.h"
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

// What a replica has to know of the pools of a call: lists of slots, in the order of the slots. A list is a range of
// `members`, or, where these are none, of the slots' numbers. Two lists of slots that feed a pool begin at the same place
// where the pool is the same.
struct Pools {
    std::vector<int> members;
    // Of each slot of the replica: the slots that feed the pool that it uses, those that feed the pool that it feeds, and
    // those that use the pool that it feeds. Empty where the slot holds no value and takes no part.
    std::vector<Range> used, fed, users;
    // Of each pool that the running statistics of the replica go towards, the slots that feed it: the pools that the
    // replica would feed if all its slots had values, without those that nobody feeds.
    std::vector<Range> tracked;

    size_t slot(int place) const { return static_cast<size_t>(members.empty() ? place : members[place]); }
};

// For the replica whose slots are the `own` ones. `counts` has the number of values of each slot. Throws
// std::invalid_argument in `shuffle` where fewer than two slots hold a value.
Pools pools_of(const Pooling& pooling, const std::vector<double>& counts, const Draw& draw, Range own);

// The moments of the slots of a list, merged, from those of each slot [slots][1 + 2C].
Vector moments_of(const Pools& pools, Range list, const Vector& slots, int64_t channels);

// Their gradients, added, from those of each slot [slots][2C].
Vector gradients_of(const Pools& pools, Range list, const Vector& slots, int64_t channels);

}  // namespace syncbn

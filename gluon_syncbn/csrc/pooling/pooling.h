// Decides which slots share a statistic, which one normalises a slot, and where gradients flow back. The terms are
// those of reference.py. These are functions on numbers, without threads, layers or arrays.
//
// A slot is a virtual device: a contiguous part of a replica's batch. Slots are numbered over all replicas, in order. A
// pool is the statistic over the slots that feed it.
//
//     mode      a pool is                                            a slot is normalised with
//     sync      all slots of the replicas, or of those in a group    the pool that it feeds
//     local     one slot                                             the pool that it feeds
//     shuffle   one slot                                             the pool of another slot
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pooling/statistics.h"
#include "types.h"

namespace syncbn {

enum class Mode : int { kSync = 0, kLocal = 1, kShuffle = 2 };

struct Pooling {
    Mode mode = Mode::kSync;
    int64_t virtual_devices = 1;  // slots of a replica; in `sync` they change nothing
    int64_t group = 0;            // consecutive replicas that share a statistic in `sync`; 0 is all
    std::vector<int> groups;      // the group of each replica, from 0, where groups are named; empty otherwise

    // The number of parts of a replica's batch.
    int64_t slots() const { return mode == Mode::kSync ? 1 : virtual_devices; }
};

// The identity of one call of one layer, which decides a permutation: the same on every replica, without communication.
struct Draw {
    uint64_t seed = 0;
    int64_t layer = 0;  // its number, the same in all processes
    int64_t node = -1;  // of a graph; -1 for an eager call
    int64_t call = 0;   // of this node, since the seed was set
};

// What a replica has to know about the other replicas' slots.
enum class Sharing {
    kNothing,  // each replica has its own statistics
    kTotal,    // all slots feed one pool: merged moments and added gradients of all slots are enough
    kEach      // the vectors of each slot
};
Sharing sharing_of(const Pooling& pooling);

// What a replica has to know about the pools of a call: lists of slots, in the order of the slots. A list is a range of
// `members` or, if these are empty, of the slots' numbers. If two slots feed the same pool, their lists begin at the
// same place.
struct Pools {
    std::vector<int> members;
    // Three lists for each slot of the replica. `used`: the slots that feed the pool that it uses. `fed`: the slots
    // that feed its own pool. `users`: the slots that use its own pool. Empty if the slot holds no value and takes no
    // part.
    std::vector<Range> used, fed, users;
    // The feeding slots of each pool that updates the replica's running statistics. These are the pools that the
    // replica would feed if all its slots had values, without empty pools.
    std::vector<Range> tracked;

    size_t slot(int place) const { return static_cast<size_t>(members.empty() ? place : members[place]); }
};

// Returns the pools for the replica with the slots `own`. `counts` has the number of values of each slot. `brought`
// has the group of each slot, from 0, where an exchange has brought the slots of some groups only; else it is empty. Throws
// std::invalid_argument if these or the pooling's groups do not fit the slots. In `shuffle` also throws it if fewer
// than two slots hold a value.
Pools pools_of(const Pooling& pooling, const std::vector<double>& counts, const Draw& draw, Range own,
               const std::vector<int>& brought = {});

// Which processes have the members of groups of this one. Their ranks, in their order, this one's included; without
// groups none. The members of these groups: the places among the replicas of those ranks, the group of each, from 0, and
// the first of this process.
struct Reach {
    std::vector<size_t> ranks;
    std::vector<int> members, groups;
    size_t first = 0;
};
// `replicas`: the number in each process.
Reach reach_of(const Pooling& pooling, const std::vector<size_t>& replicas, size_t rank);

// Combines the vectors of the slots of a list, from those of all slots [slots][length].
Vector combined(const Pools& pools, Range list, const Vector& slots, int64_t length, Combine combine);

}  // namespace syncbn

// Which slot is normalised with the statistics of which: the same on every replica, without a word between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace syncbn {

// What makes one call of one layer different from every other.
struct Draw {
    uint64_t seed = 0;
    int64_t layer = 0;
    int64_t node = -1;  // of a graph; -1 for an eager call
    int64_t call = 0;   // of this node
};

// A uniformly random permutation of 0 ... n-1 without fixed points; n is at least 2.
std::vector<size_t> derangement(const Draw& draw, size_t n);

}  // namespace syncbn

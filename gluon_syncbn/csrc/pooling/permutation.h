// Draws which slot uses the statistics of which: the same on every replica, without communication.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace syncbn {

// The identity of one call of one layer.
struct Draw {
    uint64_t seed = 0;
    int64_t layer = 0;
    int64_t node = -1;  // of a graph; -1 for an eager call
    int64_t call = 0;   // of this node
};

// Draws a permutation of 0 ... n-1 without a fixed point, each as likely; n is at least 2.
std::vector<size_t> derangement(const Draw& draw, size_t n);

}  // namespace syncbn

#include "pooling/pooling.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "pooling/statistics.h"

namespace syncbn {
namespace {

// Consecutive slots in pools of `size`; in sync every replica is one slot.
Pools grouped(const std::vector<double>& counts, int64_t size) {
    const int64_t slots = static_cast<int64_t>(counts.size());
    Pools pools;
    for (int64_t first = 0; first < slots; first += size) {
        const int64_t end = std::min(first + size, slots);
        double values = 0;
        for (int64_t slot = first; slot < end; ++slot) values += counts[slot];
        for (int64_t slot = first; slot < end; ++slot) {
            pools.feeds.push_back(counts[slot] > 0 ? first / size : kNone);
            pools.tracks.push_back(values > 0 ? first / size : kNone);
        }
    }
    pools.uses = pools.feeds;
    return pools;
}

}  // namespace

Sharing sharing_of(const Pooling& pooling) {
    if (pooling.mode == Mode::kLocal) return Sharing::kNothing;
    return pooling.mode == Mode::kSync && pooling.group == 0 ? Sharing::kTotal : Sharing::kEach;
}

Pools pools_of(const Pooling& pooling, const std::vector<double>& counts, const Draw& draw) {
    const int64_t slots = static_cast<int64_t>(counts.size());
    if (pooling.mode == Mode::kSync) return grouped(counts, pooling.group == 0 ? slots : pooling.group);
    Pools pools = grouped(counts, 1);
    if (pooling.mode == Mode::kLocal) return pools;
    std::vector<int64_t> taking_part;
    for (int64_t slot = 0; slot < slots; ++slot)
        if (counts[slot] > 0) taking_part.push_back(slot);
    if (taking_part.size() < 2)
        throw std::invalid_argument("mode 'shuffle' had " + std::to_string(taking_part.size()) +
                                    " slot with values in this step, expected at least two: use more devices, "
                                    "virtual_devices or samples.");
    const std::vector<size_t> permutation = derangement(draw, taking_part.size());
    for (size_t i = 0; i < permutation.size(); ++i) pools.uses[taking_part[i]] = taking_part[permutation[i]];
    return pools;
}

Vector moments_of_pool(const Pools& pools, int64_t pool, const Vector& slots, int64_t channels) {
    const int64_t length = moments_length(channels);
    Vector total(length, 0.0);
    for (size_t slot = 0; slot < pools.feeds.size(); ++slot)
        if (pools.feeds[slot] == pool) merge_moments(total.data(), &slots[slot * length], channels);
    return total;
}

Vector gradients_of_pool(const Pools& pools, int64_t pool, const Vector& slots, int64_t channels) {
    const int64_t length = gradients_length(channels);
    Vector total(length, 0.0);
    for (size_t slot = 0; slot < pools.uses.size(); ++slot)
        if (pools.uses[slot] == pool) add_to(total.data(), &slots[slot * length], length);
    return total;
}

}  // namespace syncbn

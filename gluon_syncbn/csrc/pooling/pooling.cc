#include "pooling/pooling.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace syncbn {
namespace {

constexpr int kNone = -1;  // no pool

// The group of each slot: in sync those of the user's, otherwise each slot is one.
std::vector<int> groups_of(const Pooling& pooling, int slots, const std::vector<int>& brought) {
    std::vector<int> groups = brought.empty() ? pooling.groups : brought;
    if (groups.empty()) {
        const int64_t size = pooling.mode == Mode::kSync ? pooling.group : 1;
        for (int slot = 0; slot < slots; ++slot) groups.push_back(slot / static_cast<int>(size));
    }
    if (groups.size() != static_cast<size_t>(slots))
        throw std::invalid_argument("groups name " + std::to_string(groups.size()) + " replicas, but " +
                                    std::to_string(slots) + " take part in this step: call the layer on all of them.");
    return groups;
}

// splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// Draws a permutation of 0 ... n-1 without a fixed point, each as likely; n is at least 2. The exchanges are those of
// Durstenfeld, "Algorithm 235: Random permutation", CACM 7(7), 1964.
std::vector<size_t> derangement(const Draw& draw, size_t n) {
    uint64_t state = mix(draw.seed) ^ static_cast<uint64_t>(draw.layer);
    state = mix(state) ^ static_cast<uint64_t>(draw.node);
    state = mix(mix(state) ^ static_cast<uint64_t>(draw.call));
    // Uniform over 0 ... n-1: 2^64 mod n numbers would favour some residues, and are drawn again.
    const auto below = [&state](uint64_t n) {
        uint64_t drawn;
        do drawn = mix(state += 0x9e3779b97f4a7c15u);
        while (drawn < (0 - n) % n);
        return static_cast<size_t>(drawn % n);
    };
    std::vector<size_t> drawn(n);
    bool fixed = true;
    while (fixed) {  // rejection keeps it uniform; about e times
        std::iota(drawn.begin(), drawn.end(), size_t{0});
        for (size_t i = n; i > 1; --i) std::swap(drawn[i - 1], drawn[below(i)]);
        fixed = false;
        for (size_t i = 0; i < n; ++i) fixed = fixed || drawn[i] == i;
    }
    return drawn;
}

// The slots with values use each other's pools.
void shuffle(std::vector<int>* uses, const std::vector<double>& counts, const Draw& draw) {
    std::vector<int> taking_part;
    for (size_t slot = 0; slot < counts.size(); ++slot)
        if (counts[slot] > 0) taking_part.push_back(static_cast<int>(slot));
    if (taking_part.size() < 2)
        throw std::invalid_argument("mode 'shuffle' had " + std::to_string(taking_part.size()) +
                                    " slot with values in this step, expected at least two: use more devices, "
                                    "virtual_devices or samples.");
    const std::vector<size_t> places = derangement(draw, taking_part.size());
    for (size_t i = 0; i < places.size(); ++i) (*uses)[taking_part[i]] = taking_part[places[i]];
}

}  // namespace

Sharing sharing_of(const Pooling& pooling) {
    if (pooling.mode == Mode::kLocal) return Sharing::kNothing;
    const bool in_groups = pooling.group != 0 || !pooling.groups.empty();
    return pooling.mode == Mode::kSync && !in_groups ? Sharing::kTotal : Sharing::kEach;
}

Pools pools_of(const Pooling& pooling, const std::vector<double>& counts, const Draw& draw, Range own,
               const std::vector<int>& brought) {
    const int slots = static_cast<int>(counts.size());
    Pools out;
    if (sharing_of(pooling) == Sharing::kTotal) {  // to which a slot without values adds nothing
        const Range all{0, slots};
        out.used.assign(static_cast<size_t>(own.end - own.begin), all);
        for (int slot = own.begin; slot < own.end; ++slot) out.fed.push_back(counts[slot] > 0 ? all : Range{0, 0});
        out.users = out.fed;
        out.tracked = {all};
        return out;
    }
    const std::vector<int> groups = groups_of(pooling, slots, brought);
    std::vector<double> values(counts.size(), 0.0);  // of each group; there are no more groups than slots
    for (int slot = 0; slot < slots; ++slot) values.at(groups[slot]) += counts[slot];
    // The pool of each slot: which it feeds, if it holds a value; and would feed, if another one does.
    std::vector<int> feeds = groups, tracks = groups;
    for (int slot = 0; slot < slots; ++slot) {
        if (counts[slot] == 0) feeds[slot] = kNone;
        if (values[groups[slot]] == 0) tracks[slot] = kNone;
    }
    std::vector<int> uses = tracks;  // also a slot of which no value counts
    if (pooling.mode == Mode::kShuffle) shuffle(&uses, counts, draw);
    std::vector<int>& members = out.members;
    bool all_neighbours = true;  // in each list
    std::map<std::pair<const std::vector<int>*, int>, Range> lists;
    // The slots that feed a pool, or that use it.
    const auto list = [&](const std::vector<int>& pools, int pool) {
        const auto [found, is_new] = lists.emplace(std::make_pair(&pools, pool), Range{0, 0});
        if (!is_new || pool == kNone) return found->second;
        const int begin = static_cast<int>(members.size());
        for (size_t slot = 0; slot < pools.size(); ++slot)
            if (pools[slot] == pool) members.push_back(static_cast<int>(slot));
        const int end = static_cast<int>(members.size());
        all_neighbours = all_neighbours && (begin == end || members[end - 1] - members[begin] == end - 1 - begin);
        return found->second = {begin, end};
    };
    std::set<int> tracked;
    for (int slot = own.begin; slot < own.end; ++slot) {
        out.used.push_back(list(feeds, uses[slot]));
        out.fed.push_back(list(feeds, feeds[slot]));
        out.users.push_back(list(uses, feeds[slot]));
        const int pool = tracks[slot];
        if (pool != kNone && tracked.insert(pool).second) out.tracked.push_back(list(feeds, pool));
    }
    if (!all_neighbours) return out;
    for (std::vector<Range>* some : {&out.used, &out.fed, &out.users, &out.tracked})
        for (Range& one : *some)
            if (one.begin < one.end) one = {members[one.begin], members[one.end - 1] + 1};
    members.clear();
    return out;
}

Reach reach_of(const Pooling& pooling, const std::vector<size_t>& replicas, size_t rank) {
    Reach out;
    if (sharing_of(pooling) != Sharing::kEach || pooling.mode != Mode::kSync) return out;
    std::vector<size_t> rank_of;
    for (size_t other = 0; other < replicas.size(); ++other) rank_of.insert(rank_of.end(), replicas[other], other);
    const std::vector<int> group_of = groups_of(pooling, static_cast<int>(rank_of.size()), {});
    std::set<int> own;
    for (size_t i = 0; i < rank_of.size(); ++i)
        if (rank_of[i] == rank) own.insert(group_of[i]);
    std::set<size_t> ranks{rank};
    for (size_t i = 0; i < rank_of.size(); ++i)
        if (own.count(group_of[i]) != 0) ranks.insert(rank_of[i]);
    out.ranks.assign(ranks.begin(), ranks.end());
    bool is_first = true;
    for (size_t i = 0, place = 0; i < rank_of.size(); ++i) {
        if (ranks.count(rank_of[i]) == 0) continue;
        const auto group = own.find(group_of[i]);
        if (group != own.end()) {
            if (rank_of[i] == rank && std::exchange(is_first, false)) out.first = out.members.size();
            out.members.push_back(static_cast<int>(place));
            out.groups.push_back(static_cast<int>(std::distance(own.begin(), group)));
        }
        ++place;
    }
    return out;
}

Vector combined(const Pools& pools, Range list, const Vector& slots, int64_t length, Combine combine) {
    const auto n = static_cast<size_t>(length);
    Vector total(n, 0.0);
    for (int place = list.begin; place < list.end; ++place)
        put(combine, total.data(), &slots[pools.slot(place) * n], n);
    return total;
}

}  // namespace syncbn

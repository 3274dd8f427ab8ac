// splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
#include "pooling/permutation.h"

#include <numeric>
#include <utility>

namespace syncbn {
namespace {

uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

}  // namespace

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

}  // namespace syncbn

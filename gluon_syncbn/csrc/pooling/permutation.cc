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

class Stream {
  public:
    explicit Stream(uint64_t state) : state_(state) {}

    // Uniform over 0 ... n-1: 2^64 mod n numbers would favour some residues, and are drawn again.
    size_t below(uint64_t n) {
        const uint64_t unfair = (0 - n) % n;
        while (true) {
            const uint64_t r = mix(state_ += 0x9e3779b97f4a7c15u);
            if (r >= unfair) return static_cast<size_t>(r % n);
        }
    }

  private:
    uint64_t state_;
};

}  // namespace

std::vector<size_t> derangement(const Draw& draw, size_t n) {
    uint64_t state = mix(draw.seed) ^ static_cast<uint64_t>(draw.layer);
    state = mix(state) ^ static_cast<uint64_t>(draw.node);
    Stream random(mix(mix(state) ^ static_cast<uint64_t>(draw.call)));
    std::vector<size_t> drawn(n);
    bool fixed = true;
    while (fixed) {  // rejection keeps it uniform; about e times
        std::iota(drawn.begin(), drawn.end(), size_t{0});
        for (size_t i = n; i > 1; --i) std::swap(drawn[i - 1], drawn[random.below(i)]);
        fixed = false;
        for (size_t i = 0; i < n; ++i) fixed = fixed || drawn[i] == i;
    }
    return drawn;
}

}  // namespace syncbn

#include "random.h"

namespace driver {

// splitmix64, see csrc/pooling/permutation.cc
uint64_t Random::seed() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// The sum of three uniform numbers from -1 to 1, which has variance 1.
double Random::normal() {
    double sum = 0;
    for (int i = 0; i < 3; ++i) sum += static_cast<double>(seed() >> 11) * 0x1p-52 - 1;
    return sum;
}

std::vector<size_t> Random::order(size_t n) {
    std::vector<size_t> out(n);
    for (size_t i = 0; i < n; ++i) out[i] = i;
    for (size_t i = n; i > 1; --i) std::swap(out[i - 1], out[seed() % i]);
    return out;
}

}  // namespace driver

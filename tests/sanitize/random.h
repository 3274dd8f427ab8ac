// Whatever a run chooses: the same seed chooses the same.
#pragma once

#include "standard.h"

namespace driver {

class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}

    // Of another one; splitmix64, see csrc/pooling/pooling.cc
    uint64_t seed() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    int whole(int lowest, int highest) { return lowest + static_cast<int>(seed() % (highest - lowest + 1)); }
    bool one_in(int n) { return whole(1, n) == 1; }
    // Nearly: the sum of three uniform numbers from -1 to 1, which has variance 1.
    double normal() {
        double sum = 0;
        for (int i = 0; i < 3; ++i) sum += static_cast<double>(seed() >> 11) * 0x1p-52 - 1;
        return sum;
    }
    // Of 0 ... n-1
    std::vector<size_t> order(size_t n) {
        std::vector<size_t> out(n);
        std::iota(out.begin(), out.end(), size_t{0});
        for (size_t i = n; i > 1; --i) std::swap(out[i - 1], out[seed() % i]);
        return out;
    }
    template <typename T>
    T one_of(const std::vector<T>& values) {
        return values[seed() % values.size()];
    }

  private:
    uint64_t state_;
};

}  // namespace driver

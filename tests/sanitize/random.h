// Whatever a run chooses: the same seed chooses the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace driver {

class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t seed();  // of another one
    int whole(int lowest, int highest) { return lowest + static_cast<int>(seed() % (highest - lowest + 1)); }
    bool one_in(int n) { return whole(1, n) == 1; }
    double normal();                      // nearly
    std::vector<size_t> order(size_t n);  // 0 ... n-1
    template <typename T>
    T one_of(const std::vector<T>& values) {
        return values[seed() % values.size()];
    }

  private:
    uint64_t state_;
};

}  // namespace driver

// Plans how a tensor is distributed over the blocks of a launch; see kernels.cu.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/driver.h"
#include "types.h"

namespace syncbn {
namespace cuda {

constexpr int64_t kBlocks = 2048;         // enough blocks to fill the largest GPU
constexpr int64_t kPerThread = 32;        // the fewest values for a thread of a block
constexpr int64_t kWidest = 32;           // the widest tile of channels
constexpr int64_t kMostInGridYZ = 65535;  // CUDA's limit

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t between(int64_t low, int64_t value, int64_t high) { return std::max(low, std::min(value, high)); }

struct Plan {
    const Shape shape;
    const int64_t samples, per_sample, slots;
    int32_t width = 1;
    int64_t tiles, chunks, segment = 8192;

    Plan(const Shape& shape, int64_t samples, int64_t slots)
        : shape(shape), samples(samples), per_sample(samples == 0 ? 0 : shape.outer / samples), slots(slots) {
        while (shape.inner == 1 && width < kWidest && width < shape.channels) width *= 2;
        tiles = ceil_div(shape.channels, width);
        const int64_t per_slot = ceil_div(samples, slots) * per_sample * shape.inner * width;
        chunks = between(1, std::min(kBlocks / (tiles * slots), per_slot / (kBlock * kPerThread)), kMostInGridYZ);
        while (segment > 512 && rows() * ceil_div(shape.inner, segment) < 8 * kBlocks) segment /= 2;
    }

    Tiling tiling() const { return {samples, per_sample, shape.channels, shape.inner, slots, segment, width}; }

    // Grids of the reductions, and of kernels that write a tensor.
    Grid reduce() const { return {tiles, slots, chunks}; }
    Grid each() const {
        if (shape.inner == 1) return reduce();
        const int64_t warps = kBlock / 32;
        return {between(1, ceil_div(rows() * ceil_div(shape.inner, segment), warps), int64_t{1} << 20)};
    }

  private:
    int64_t rows() const { return shape.outer * shape.channels; }
};

}  // namespace cuda
}  // namespace syncbn

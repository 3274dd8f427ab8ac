// Plans how a tensor is distributed over the blocks of a launch; see kernels.cu.
#pragma once

#include <algorithm>

#include "cuda/driver.h"
#include "types.h"

namespace syncbn::cuda {

constexpr Index kBlocks = 2048;   // enough blocks to fill the largest GPU
constexpr Index kPerThread = 32;  // the fewest values for a thread of a block
constexpr Index kWidest = 32;     // the widest tile of channels

inline Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }

struct Plan : Tiling {
    Index tiles, chunks;

    Plan(const Shape& shape, Index samples, Index slots)
        : Tiling{samples, samples == 0 ? 0 : shape.outer / samples, shape.channels, shape.inner, slots, 8192, 1} {
        while (inner == 1 && width < kWidest && width < channels) width *= 2;
        tiles = ceil_div(channels, width);
        const Index per_slot = ceil_div(samples, slots) * per_sample * inner * width;
        chunks = std::max<Index>(1, std::min(kBlocks / (tiles * slots), per_slot / (kBlock * kPerThread)));
        while (segment > 512 && segments() < 8 * kBlocks) segment /= 2;
    }

    // Grids of the reductions, and of kernels that write a tensor.
    Grid reduce() const { return {tiles, slots, chunks}; }
    Grid each() const {
        if (inner == 1) return reduce();
        return {std::max<Index>(1, std::min(ceil_div(segments(), kBlock / 32), Index{1} << 20))};
    }

  private:
    Index segments() const { return samples * per_sample * channels * ceil_div(inner, segment); }
};

}  // namespace syncbn::cuda

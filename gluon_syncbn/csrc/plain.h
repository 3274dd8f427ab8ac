// Defines plain values that the kernels of GPUs share with the rest, without the standard library.
#pragma once

namespace syncbn {

// A part of a list, from `begin` up to `end`.
struct Range {
    int begin, end;
};

// The layout of a mask: an array that names the positions of a tensor whose values count in the statistics. The extents
// are those of the tensor without the channel axis, filled up with 1 at the front. A stride of 0 repeats values. A value
// that is not 0 counts, whatever its type.
struct Mask {
    int bytes;     // of a value
    int floating;  // a value without bits but the sign is 0
    long long size;
    long long extents[4], strides[4];
};

}  // namespace syncbn

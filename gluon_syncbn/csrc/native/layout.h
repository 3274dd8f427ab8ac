// oneDNN's layouts in which a call can take its data as they are.
#pragma once

#include <cstdint>
#include <vector>

#include "native/abi.h"
#include "types.h"

namespace syncbn {
namespace native {

// Null where they are in the order of the dimensions, or in a layout that the kernels do not know: of float32, with 8
// or 16 channels side by side, and all channels in such blocks.
const Descriptor* blocks_of(const NDArray& array, Type type, const Shape& shape);
int64_t block_of(const Descriptor& descriptor);
// The same type, extents and order.
bool alike(const Descriptor& a, const Descriptor& b);

}  // namespace native
}  // namespace syncbn

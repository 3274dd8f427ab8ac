// Finds oneDNN's layouts in which a call can take its data without a copy.
#pragma once

#include <cstdint>
#include <vector>

#include "native/abi.h"
#include "types.h"

namespace syncbn {
namespace native {

// Returns the layout if it is float32 or bfloat16 with all channels in blocks of 8 or 16 neighbours. Returns null for
// the order of the dimensions, and for other layouts.
const Descriptor* blocks_of(const NDArray& array, Type type, const Shape& shape);
int64_t block_of(const Descriptor& descriptor);
// Whether type, extents and order are the same.
bool alike(const Descriptor& a, const Descriptor& b);

}  // namespace native
}  // namespace syncbn

// What a call has to give, from sums in float64.
#pragma once

#include <memory>
#include <vector>

#include "replica.h"

namespace driver {

// Compares the outputs and gradients of all replicas of a call, in the order in which they were issued, and takes note of
// what it makes of the layer's running statistics. Calls of one layer come in the order in which they were issued.
void check(Layer& layer, const std::vector<std::unique_ptr<Replica>>& replicas);
// After all calls that were in flight.
void check_running_statistics(const Layer& layer);

}  // namespace driver

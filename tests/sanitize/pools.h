// What the replicas of a call have to have in common. It shows that each call got what its own replicas gave; that the
// numbers are right in every mode, random layers show (tests/soak/layers).
#pragma once

#include <memory>
#include <vector>

#include "replica.h"

namespace driver {

// What failed left nothing plausible, and what succeeded has written all.
void check_values(const ArrayP& got, int req, bool failed);
// Checks a call by all of its replicas, in the order in which they were issued, and takes note of what it makes of the
// layer's running statistics. Calls of one layer come in the order in which they were issued.
void check(Layer& layer, const std::vector<std::unique_ptr<Replica>>& replicas);
// After all calls that were in flight.
void check_running_statistics(const Layer& layer);

}  // namespace driver

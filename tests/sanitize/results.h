// What the arrays of a call have to hold. That the numbers are right, random layers show (tests/soak/layers).
#pragma once

#include <memory>
#include <vector>

#include "replica.h"

namespace driver {

// What failed left nothing plausible, and what succeeded has written all.
void check_values(const ArrayP& got, int req, bool failed);
// A call by all of its replicas, which succeeds.
void check(const Layer& layer, const std::vector<std::unique_ptr<Replica>>& replicas);
// After all calls that were in flight.
void check_running_statistics(const Layer& layer);

}  // namespace driver

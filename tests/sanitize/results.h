// What the arrays of a call have to hold. That the numbers are right, random layers show (tests/soak).
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "figures.h"
#include "replica.h"

namespace driver {

// What failed left nothing plausible, and what succeeded has written all.
inline void check_values(const ArrayP& got, int req, bool failed) {
    if (!got || req == syncbn::kNull || got->broken) return;
    int64_t numbers = 0;
    for (int64_t i = 0; i < got->size; ++i) numbers += !std::isnan(got->get(i));
    expect(numbers == (failed ? 0 : got->size), std::to_string(numbers) + " of " + std::to_string(got->size) +
                                                    " values are numbers, failed: " + std::to_string(failed));
}

// A call by all of its replicas, which succeeds.
inline void check(const Layer& layer, const std::vector<std::unique_ptr<Replica>>& replicas) {
    const std::string what = " of " + layer.name + " in mode " + std::to_string(static_cast<int>(layer.spec.mode));
    for (const auto& replica : replicas) {
        const std::string error = replica->forward.error;
        expect(error.empty(), "the forward" + what + " succeeds: " + error);
        check_values(replica->y, replica->req, false);
        for (const Backward& backward : replica->backwards) {
            expect(backward.outcome.error.empty(), "the backward" + what + " succeeds: " + backward.outcome.error);
            for (const ArrayP& array : {backward.dx, backward.dgamma, backward.dbeta, backward.daddend})
                check_values(array, syncbn::kWrite, false);
        }
    }
}

// After all calls that were in flight.
inline void check_running_statistics(const Layer& layer) {
    for (const Placed& placed : layer.placed) {
        check_values(placed.parameters.running_mean, syncbn::kWrite, false);
        check_values(placed.parameters.running_var, syncbn::kWrite, false);
    }
}

}  // namespace driver

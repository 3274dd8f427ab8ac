// Sums gradients over processes as operations of MXNet's engine. An operation takes an array when the backward has
// written it, and ends when the sum is there.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "exchange/sums.h"

namespace syncbn {
namespace native {

// Begins a round. `arrays`: of each summand a handle for each context, one summand after the other. They are dense, and
// on CPUs or the devices of `gpus`. Throws Failure if MXNet refuses.
void sum_gradients(Sums& sums, int64_t channel, int64_t number, double timeout, std::vector<Summand> summands,
                   size_t contexts, void** arrays, cuda::AllReduce* gpus);

}  // namespace native
}  // namespace syncbn

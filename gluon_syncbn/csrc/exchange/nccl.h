// The exchange between GPUs, one for each replica: NCCL brings what each contributes to all of them, without the host.
#pragma once

#include "exchange/exchange.h"

namespace syncbn {

// For so many replicas of all processes. `processes` agrees on whose turn it is; null where the replicas are all of this
// process. Where the replicas need the total of their vectors alone and are many, an all-reduce adds the vectors up.
std::shared_ptr<Exchange> nccl_exchange(size_t replicas, std::shared_ptr<Exchange> processes, bool total);

// For tests: how many replicas are many, for exchanges that are made later. Returns the old value.
size_t all_reduce_from(size_t replicas);

}  // namespace syncbn

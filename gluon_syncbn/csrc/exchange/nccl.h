// Exchanges between GPUs, one for each replica: NCCL brings each contribution to all GPUs, without the host.
#pragma once

#include "exchange/exchange.h"
#include "pooling/pooling.h"

namespace syncbn {

// `replicas` counts those of all processes. `processes` agrees on the turns; null if all replicas are in this process.
// An all-reduce adds the vectors if there are many replicas that need only the total. Rows are gathered as bytes.
std::shared_ptr<Exchange> nccl_exchange(size_t replicas, std::shared_ptr<Exchange> processes, Sharing sharing);

// For tests: sets how many replicas are many, for later exchanges. Returns the old value.
size_t all_reduce_from(size_t replicas);

}  // namespace syncbn

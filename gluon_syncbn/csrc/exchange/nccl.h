// Exchanges between GPUs, one for each replica: NCCL brings each contribution to all GPUs, without the host.
#pragma once

#include "exchange/exchange.h"
#include "pooling/pooling.h"

namespace syncbn {

// `replicas` counts those of all processes. `processes` agrees on the turns; null if all replicas are in this process.
// Rows are gathered as bytes, and their gradients added.
std::shared_ptr<Exchange> nccl_exchange(size_t replicas, std::shared_ptr<Exchange> processes, Sharing sharing);

}  // namespace syncbn

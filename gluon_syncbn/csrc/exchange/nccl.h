// Exchanges between GPUs of one process, one for each replica: NCCL brings each contribution to all of them, without the
// host.
#pragma once

#include "exchange/exchange.h"
#include "pooling/pooling.h"

namespace syncbn {

// Rows are gathered as bytes, and their gradients added.
std::shared_ptr<Exchange> nccl_exchange(size_t replicas, Sharing sharing);

}  // namespace syncbn

// Exchanges between GPUs of one process, one for each replica: NCCL brings each contribution to all of them, without the
// host.
#pragma once

#include "exchange/exchange.h"

namespace syncbn {

std::shared_ptr<Exchange> nccl_exchange(size_t replicas);

}  // namespace syncbn

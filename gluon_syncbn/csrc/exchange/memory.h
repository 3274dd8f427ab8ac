// The exchange between threads of one process: all vectors are in its memory already.
#pragma once

#include "exchange/exchange.h"

namespace syncbn {

// `route`: kNcclOrHost, kNccl or kHost.
std::shared_ptr<Exchange> memory_exchange(GpuRoute route);

}  // namespace syncbn

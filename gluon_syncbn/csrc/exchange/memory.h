// Exchanges between threads of one process, whose memory holds all vectors already.
#pragma once

#include "exchange/exchange.h"

namespace syncbn {

std::shared_ptr<Exchange> memory_exchange();

}  // namespace syncbn

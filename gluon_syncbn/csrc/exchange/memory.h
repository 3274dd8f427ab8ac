// The exchange between threads of one process: all vectors are in its memory already.
#pragma once

#include "exchange/exchange.h"

namespace syncbn {

std::shared_ptr<Exchange> memory_exchange();

}  // namespace syncbn

// Adds over the contexts of this process by a KVStore of MXNet's, in Python.
#pragma once

#include "exchange/exchange.h"

namespace syncbn {

// `number` identifies the exchange in Python.
std::shared_ptr<Exchange> mxnet_kvstore(int64_t number);

}  // namespace syncbn

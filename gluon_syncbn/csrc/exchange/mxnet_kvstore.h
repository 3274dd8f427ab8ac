// A KVStore of MXNet's adds over the contexts of this process, in Python.
#pragma once

#include "exchange/exchange.h"

namespace syncbn {

// `number`: that of the exchange in Python. `form`: kHost, or kPadded for arrays that are on GPUs.
std::shared_ptr<Exchange> mxnet_kvstore(int64_t number, Form form);

}  // namespace syncbn

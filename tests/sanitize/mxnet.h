// MXNet's C interface, as far as the core calls it on a CPU.
#pragma once

#include <string>

#include "mxnet_api.h"

namespace driver {

// Hands MXNet's functions to the core, which registers its operator.
void load_core();
CustomOpPropCreator operator_creator();
// MXNet has this flag for each thread: what `autograd.record()` and `autograd.predict_mode()` set.
void set_training(bool training);
// The error that the core has handed to an array of the call that this thread runs, once; empty where there is none.
std::string take_error();

}  // namespace driver

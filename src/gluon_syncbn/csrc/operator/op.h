// The custom operator `gluon_syncbn`.
#pragma once

#include "mxnet_api.h"

namespace syncbn {

// Registers the operator with the MXNet library that these functions belong to. Returns MXNet's status.
int register_operator(const MXNet& functions);

}  // namespace syncbn

// Declares the custom operators `gluon_syncbn` and `gluon_syncbn_gather`.
#pragma once

#include <mutex>

#include "mxnet_api.h"

namespace syncbn {

// Registers the operators with the MXNet library of these functions. Returns MXNet's status.
int register_operator(const MXNet& functions);

// Whether this is the process's first thread.
bool on_main_thread();

// Whether these callbacks of a custom operator belong to a `Call`, which is the state of each.
bool is_ours(const MXCallbackList& callbacks);

// MXNet's list of all errors has no lock (AddToGlobalExceptions in src/engine/threaded_engine.h). Simultaneous failures
// may end the process. So they leave one by one, with time for each to become known.
std::unique_lock<std::mutex> turn_to_fail();

}  // namespace syncbn

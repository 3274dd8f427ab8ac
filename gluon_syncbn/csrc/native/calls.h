// Brings calls from MXNet's engine to the layer without MXNet's own `Custom`. That one copies arrays in oneDNN's
// layouts and frees the copies while the operator still runs. It also takes three operations of the engine for one.
#pragma once

#include <exception>
#include <string>

#include "native/abi.h"

namespace syncbn {
namespace native {

// Takes over calls of our operator on "cpu" or "gpu" contexts; other custom operators are forwarded to MXNet's handler.
// The build of MXNet's library is known. Returns the reason if it cannot; otherwise empty.
std::string take_calls(const std::string& device);

// Called in the child of a fork, which has none of the threads that calls run in.
void forget_workers();

// Ends an operation of the engine with an error.
void complete_with_error(const Completion& complete, const std::exception_ptr& reason) noexcept;

}  // namespace native
}  // namespace syncbn

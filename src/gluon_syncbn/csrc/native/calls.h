// The way of a call from MXNet's engine to the layer without MXNet's own `Custom` between: that copies arrays in oneDNN's
// layouts and frees the copies while the operator still runs, and takes three operations of the engine for one.
#pragma once

#include <cstdint>
#include <string>

namespace syncbn {
namespace native {

// From now on, calls of our operator on CPUs come this way; those of other custom operators go on to MXNet's. `library`:
// of dlopen, MXNet's. Returns why not; empty where they do.
std::string take_calls(void* library);

// How many forwards and backwards had their data in blocks of channels.
int64_t blocked_calls();

}  // namespace native
}  // namespace syncbn

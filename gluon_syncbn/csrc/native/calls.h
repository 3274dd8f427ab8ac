// The way of a call from MXNet's engine to the layer without MXNet's own `Custom` between: that copies arrays in oneDNN's
// layouts and frees the copies while the operator still runs, and takes three operations of the engine for one.
#pragma once

#include <cstdint>
#include <string>

namespace syncbn {
namespace native {

// From now on, calls of our operator on "cpu" or "gpu" contexts come this way; those of other custom operators go on to
// MXNet's. `library`: of dlopen, MXNet's. Returns why not; empty where they do.
std::string take_calls(void* library, const std::string& device);

// How many forwards and backwards had their data in blocks of channels.
int64_t blocked_calls();
// How many waited for nobody and were run by the engine's own threads.
int64_t lone_calls();

}  // namespace native
}  // namespace syncbn

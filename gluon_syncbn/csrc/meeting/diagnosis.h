// Describes who is here, who is missing, and what the user can do about it, and records who was waited for. All but
// `slowest` is called under the rendezvous's lock.
#pragma once

#include <string>

#include "meeting/meeting.h"

namespace syncbn {

// "1 of 2 replicas arrived (cpu(0)), missing cpu(1)"
std::string describe(const Meeting& meeting, const Phase& phase);
// What to do about a replica that has not been called.
constexpr const char* kCallAll =
    "Call the net on all its devices, and then wait for results (asnumpy, print, a metric, waitall, a new DataLoader). "
    "For a batch on fewer devices use gluon_syncbn.only_on(contexts).";
// The likely cause of a wait, and what to do about it.
std::string likely_cause(const Meeting& meeting, const Phase& phase);
// Why a call on this context is not a replica of the layer.
std::string why_not_here(const LayerConfig& config, const std::string& context);

// Records how long the replicas of a phase waited, if all have arrived.
void record_meeting(const std::string& call, const Meeting& meeting, const Phase& phase);
// Returns the layers with the longest waits and the replicas that came last there, in a few lines; empty without
// records.
std::string slowest();

}  // namespace syncbn

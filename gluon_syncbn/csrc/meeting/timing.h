// Who waits for whom, and how long: told of each meeting where somebody wants to know, and summed up for the end of a run.
#pragma once

#include <string>

#include "meeting/meeting.h"

namespace syncbn {

// A phase whose replicas have all arrived, under the room's lock.
void record_meeting(const std::string& layer, const std::string& call, const Meeting& meeting, const Phase& phase);

// Which layers were waited in longest and which replicas came last there, in a few lines; empty where nothing was
// recorded.
std::string slowest();

}  // namespace syncbn

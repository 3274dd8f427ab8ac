// Records which replicas wait for which, and how long: for each meeting if requested, and in total at the end of a run.
#pragma once

#include <string>

#include "meeting/meeting.h"

namespace syncbn {

// Records a phase whose replicas have all arrived, under the rendezvous's lock.
void record_meeting(const std::string& call, const Meeting& meeting, const Phase& phase);

// Returns the layers with the longest waits and the replicas that came last there, in a few lines; empty without
// records.
std::string slowest();

}  // namespace syncbn

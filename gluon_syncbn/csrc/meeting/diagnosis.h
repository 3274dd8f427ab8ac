// Describes who is here, who is missing, and what the user can do about it. Called under the rendezvous's lock.
#pragma once

#include <string>

#include "meeting/meeting.h"

namespace syncbn {

// The likely cause of a wait. If nothing is computed for `stuck_after` seconds, waiting is useless; 0: waiting may
// help.
struct Cause {
    std::string text;
    double stuck_after;
};

// "1 of 2 replicas arrived (cpu(0)), missing cpu(1)"
std::string describe(const Meeting& meeting, int phase);
// What to do about a replica that has not.
std::string how_to_call(const Meeting& meeting);
Cause likely_cause(const Meeting& meeting, int phase);
// Why a call on this context is not a replica of the layer.
std::string why_not_here(const Terms& terms, const std::string& context);

}  // namespace syncbn

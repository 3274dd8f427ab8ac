// The kinds of run. Each goes on for its seconds, or for one round where that takes longer.
#pragma once

#include "step.h"

namespace driver {

// One or two layers beside each other, several steps in flight, every result checked.
void healthy(Run& run);
// The same with states that are executed again and again.
void repeated(Run& run);
// Layers that Python lets go while their steps are in flight.
void dropping(Run& run);
// A step in which something is wrong, and a right one after it.
void failing(Run& run);
// A step in which an allocation of the core fails, and a right one after it.
void starving(Run& run);
// Settings that change in other threads and make no difference to results.
void changing(Run& run);
// Settings that change in other threads and pull the rug from under a step: it ends somehow, and one after it is right.
void disturbed(Run& run);
// Handlers of SIGINT that are installed anew while replicas wait, and signals that come.
void waiting(Run& run);
// Replicas that wait for one that never comes, until Ctrl-C, the end of the process, a fork or a failure ends that.
void ended(Run& run);
// A call that is repeated, and that does not come, until time is up or the step fails.
void recalling(Run& run);
// Long sums between ranks, which are threads here: rounds and arrays come in an order of each rank's own.
void summing(Run& run);
// The end of the process. Nothing can run after it.
void closing(Run& run);

}  // namespace driver

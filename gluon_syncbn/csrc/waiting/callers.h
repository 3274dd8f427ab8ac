// Knows whether a thread is left that could call a missing replica. Only Python sees what its threads do. So a waiting
// thread asks, and a thread of Python's answers within moments.
#pragma once

#include <string>

namespace syncbn {

struct Callers {
    std::string wait;      // the results that all of them wait for, and where; empty if one could call
    bool for_all = false;  // they wait for all pending operations, thus also for the missing replica
    double lasts = 0;      // seconds from the first of equal answers to the last one
};

void ask_for_callers();
// For Python's thread: returns after `seconds`, or as soon as somebody asks. Whether somebody has asked.
bool asked_for_callers(double seconds);
void answer_callers(std::string wait, bool for_all);
// The answers since this time, on the clock of `seconds`.
Callers callers(double since);
// Called in the child of a fork.
void forget_callers();

}  // namespace syncbn

// Knows whether a thread is left that could call a missing replica. Only Python sees what its threads do. So a waiting
// thread asks, and the thread of Python's that takes records answers within moments.
#pragma once

#include <mutex>
#include <string>
#include <utility>

#include "lock.h"
#include "log.h"
#include "waiting/wait.h"

namespace syncbn {

struct Callers {
    std::string wait;     // the results that all of them wait for, and where; empty if one could call
    double patience = 0;  // seconds after which such a wait is one for the missing replica
};

struct AnswerForCallers {
    Mutex mutex;  // guards the rest
    Callers answer;
    double last = 0;  // its time

    static constexpr double kGap = 1;  // seconds; whoever waits asks more often
};
inline Renewed<AnswerForCallers>& answer = *new Renewed<AnswerForCallers>;  // outlives the threads that wait at exit

// Many replicas ask: an answer serves all of them for a while.
inline void ask_for_callers() {
    {
        std::lock_guard<std::mutex> lock(answer->mutex);
        if (seconds() - answer->last < kSleep) return;
    }
    std::lock_guard<std::mutex> lock(records->mutex);
    records->asks = true;
    records->changed->notify_one();
}

inline void answer_callers(std::string wait, double patience) {
    std::lock_guard<std::mutex> lock(answer->mutex);
    answer->last = seconds();
    answer->answer = {std::move(wait), patience};
}

// The answer, if it came lately, and since this time on the clock of `seconds`.
inline Callers callers(double since) {
    std::lock_guard<std::mutex> lock(answer->mutex);
    return answer->last < since || seconds() - answer->last > answer->kGap ? Callers() : answer->answer;
}

}  // namespace syncbn

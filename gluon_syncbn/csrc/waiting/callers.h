// Knows whether a thread is left that could call a missing replica. Only Python sees what its threads do. So a waiting
// thread asks, and a thread of Python's answers within moments.
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <utility>

#include "lock.h"
#include "waiting/wait.h"

namespace syncbn {

struct Callers {
    std::string wait;     // the results that all of them wait for, and where; empty if one could call
    double patience = 0;  // seconds after which such a wait is one for the missing replica
};

struct QuestionForCallers {
    Mutex mutex;  // guards everything here
    Condition asked;
    bool open = false;
    Callers answer;
    double last = 0;  // the time of the answer

    static constexpr double kGap = 1;  // seconds; whoever waits asks more often
};
inline Renewed<QuestionForCallers>& question =
    *new Renewed<QuestionForCallers>;  // outlives the threads that wait at exit

inline void ask_for_callers() {
    std::lock_guard<std::mutex> lock(question->mutex);
    question->open = true;
    question->asked->notify_one();
}

// For Python's thread: returns after `seconds`, or as soon as somebody asks. Whether somebody has asked.
inline bool asked_for_callers(double seconds) {
    std::unique_lock<std::mutex> lock(question->mutex);
    question->asked->wait_for(lock, std::chrono::duration<double>(seconds), [&] { return question->open; });
    return std::exchange(question->open, false);
}

inline void answer_callers(std::string wait, double patience) {
    std::lock_guard<std::mutex> lock(question->mutex);
    question->last = seconds();
    question->answer = {std::move(wait), patience};
}

// The answer, if it came lately, and since this time on the clock of `seconds`.
inline Callers callers(double since) {
    std::lock_guard<std::mutex> lock(question->mutex);
    return question->last < since || seconds() - question->last > question->kGap ? Callers() : question->answer;
}

}  // namespace syncbn

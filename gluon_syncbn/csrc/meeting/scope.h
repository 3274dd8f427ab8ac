// Represents a thread's part of a step, between entering and leaving `with autograd.record()` or `train_mode()`.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "failure.h"
#include "waiting/step.h"

namespace syncbn {

inline bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

class Scope {
  public:
    Scope(std::string thread, bool open) : thread(std::move(thread)), open(open) {}

    const std::string thread;  // its name
    std::atomic<bool> open;
    int64_t step = syncbn::step().number;  // the number of its last step; only its own thread reads it

    FirstFailure why_ended;  // its step
    // Throws the reason why its step has ended. A failure from before this scope's beginning ends the step here. Other
    // threads may still be in their scopes then. Their next scope forgets the failure, and this thread would not learn
    // of it.
    void throw_if_ended() {
        if (before_ != nullptr && syncbn::step().failure() == before_) why_ended.fail(*before_);
        why_ended.throw_if_failed();
    }

  private:
    const std::shared_ptr<const Failure> before_ = open ? syncbn::step().failure() : nullptr;  // the scope's beginning
};

// Whether this thread makes or executes a graph whose operators MXNet keeps, each with the temporary space that it took.
// The calls of the graph have been announced, also those that MXNet issues where it makes an operator for a new shape.
inline thread_local bool within_graph = false;

inline thread_local std::shared_ptr<Scope> entered_scope;  // of this thread

// Returns the scope of this thread. Calls outside of any scope share one, which is never open.
inline const std::shared_ptr<Scope>& current_scope() {
    static const auto& outside = *new auto(std::make_shared<Scope>("", false));
    return entered_scope != nullptr ? entered_scope : outside;
}

}  // namespace syncbn

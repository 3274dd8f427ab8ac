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
    ~Scope() { delete why_ended_.load(); }

    const std::string thread;  // its name
    std::atomic<bool> open;
    int64_t step = syncbn::step().number;  // the number of its last step; only its own thread reads it

    // Ends its step; the first reason stays.
    void end(const Failure& failure) {
        auto reason = std::make_unique<const Failure>(failure);
        const Failure* none = nullptr;
        if (why_ended_.compare_exchange_strong(none, reason.get())) reason.release();
    }
    // Throws the reason why its step has ended. A failure from before this scope's beginning ends the step here. Other
    // threads may still be in their scopes then. Their next scope forgets the failure, and this thread would not learn
    // of it.
    void throw_if_ended() {
        if (before_ != nullptr && syncbn::step().failure() == before_) end(*before_);
        if (const Failure* why = why_ended()) throw Failure(*why);
    }
    // Returns that reason, or null. It lives as long as the scope.
    const Failure* why_ended() const { return why_ended_; }

  private:
    const std::shared_ptr<const Failure> before_ = open ? syncbn::step().failure() : nullptr;  // the scope's beginning
    std::atomic<const Failure*> why_ended_{nullptr};  // without a lock, because a fork might find it taken
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

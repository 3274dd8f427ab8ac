// Represents a thread's part of a step, between entering and leaving `with autograd.record()` or `train_mode()`.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "failure.h"

namespace syncbn {

class Scope {
  public:
    // `before`: the failure at its beginning, or null.
    Scope(std::string thread, std::shared_ptr<const Failure> before, bool open = true);
    ~Scope();

    const std::string thread;  // its name
    std::atomic<bool> open;
    int64_t step;  // the number of its last step; only its own thread reads it

    // Ends its step; the first reason stays.
    void end(const Failure& failure);
    // Throws the reason why its step has ended. A failure from before this scope's beginning ends the step here. Other
    // threads may still be in their scopes then. Their next scope forgets the failure, and this thread would not learn
    // of it.
    void throw_if_ended();
    // Returns that reason, or null. It lives as long as the scope.
    const Failure* why_ended() const { return why_ended_; }

  private:
    const std::shared_ptr<const Failure> before_;
    std::atomic<const Failure*> why_ended_{nullptr};  // without a lock, because a fork might find it taken
};

// Returns the scope of this thread. Calls outside of any scope share one, which is never open.
const std::shared_ptr<Scope>& current_scope();

// Whether this thread executes a graph that has announced its calls. MXNet issues some of them, too, where it makes an
// operator for a new shape.
inline thread_local bool within_graph = false;

void enter_scope(std::string thread);
void leave_scope();

}  // namespace syncbn

// What one thread does between entering and leaving `with autograd.record()` or `train_mode()`: its part of a step.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "failure.h"

namespace syncbn {

class Scope {
  public:
    explicit Scope(std::string thread);
    ~Scope();

    const std::string thread;  // its name
    std::atomic<bool> open{true};
    int64_t step;  // the number of the step that this scope has last been part of; for its own thread

    // Its step cannot go on; the first reason stays.
    void end(const Failure& failure);
    // Throws that reason. It ends here where the step had failed before this scope was entered, which happens where other
    // threads are still in theirs: their next one would forget the failure, and nobody would tell this thread.
    void throw_if_ended();
    // That reason; null where there is none. It lives as long as the scope.
    const Failure* why_ended() const { return why_ended_; }

  private:
    const std::shared_ptr<const Failure> before_;     // the failure that it has found
    std::atomic<const Failure*> why_ended_{nullptr};  // no lock, which a fork might find taken
};

// That of this thread. Calls outside of any share one, which is never open.
const std::shared_ptr<Scope>& current_scope();
bool within_scope();

// This thread executes a graph that has told of its calls as a whole. MXNet issues some of them anew where a shape has
// changed, on some contexts alone.
bool& within_graph();

void enter_scope(std::string thread);
void leave_scope();

}  // namespace syncbn

// Records whether the step has failed. Then every wait ends and nothing is exchanged until `reset`.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "failure.h"

namespace syncbn {

class Step {
  public:
    // The first reason stays. Without memory for it, a constant reason replaces it.
    void fail(const std::exception& error) noexcept;
    // Returns the reason, or null.
    std::shared_ptr<const Failure> failure() const;
    // Throws the reason.
    void throw_if_failed() const;
    // Whether this is the current step's number.
    bool goes_on(int64_t number) const { return number == this->number; }
    void clear();

    // The number of forgotten steps. After raising it, forget the meetings and call `clear`.
    std::atomic<int64_t> number{0};
    // The process has run its exit handlers: operators that run now fail.
    std::atomic<bool> closed{false};
    // The exit handlers have begun and all threads that train have ended, so nobody reads a result any more.
    std::atomic<bool> unread{false};
    // A thread in the middle of a step waits to fork, so not all replicas can be called.
    std::atomic<bool> forking{false};
    // The process has no batch left: its calls contribute an empty one, so that the other processes can go on.
    std::atomic<bool> out_of_batches{false};

  private:
    mutable std::mutex mutex_;  // guards failure_; held while a pointer is copied, and without other locks
    std::shared_ptr<const Failure> failure_;
    const std::shared_ptr<const Failure> no_memory_ = std::make_shared<const Failure>(kNoMemory);
    std::atomic<bool> failed_{false};  // avoids the lock if there is no failure
};

Step& step();

}  // namespace syncbn

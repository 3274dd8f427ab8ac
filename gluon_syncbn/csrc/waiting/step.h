// Whether the step has failed: once it has, every wait ends and nothing is exchanged any more, until `reset`.
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
    // The first reason stays. Where there is no memory for it, another one does.
    void fail(const std::exception& error) noexcept;
    // The reason; null where all is well.
    std::shared_ptr<const Failure> failure() const;
    // Throws the reason.
    void throw_if_failed() const;
    // Whether this is its number.
    bool goes_on(int64_t number) const { return number == this->number; }
    void clear();

    // How many steps have been forgotten. Whoever raises it forgets the meetings next, and calls `clear` after that.
    std::atomic<int64_t> number{0};
    // The process has run its exit handlers: whatever comes to run is a failure.
    std::atomic<bool> closed{false};
    // A thread in the middle of a step, whose replicas cannot all be called, waits to fork.
    std::atomic<bool> forking{false};
    // The only thread that trains is in the middle of a step and waits for all that MXNet has in flight.
    std::atomic<bool> waiting{false};
    // The process has no batch left: its calls contribute an empty one, so that the other processes can go on.
    std::atomic<bool> out_of_batches{false};

  private:
    mutable std::mutex mutex_;  // guards failure_; held for as long as a pointer is copied, and under no condition
    std::shared_ptr<const Failure> failure_;
    const std::shared_ptr<const Failure> no_memory_ = std::make_shared<const Failure>(kNoMemory);
    std::atomic<bool> failed_{false};  // so that nobody takes the lock where all is well
};

Step& step();

}  // namespace syncbn

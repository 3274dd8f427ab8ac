// Records whether the step has failed. Then every wait ends and nothing is exchanged until `reset`.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "failure.h"
#include "lock.h"

namespace syncbn {

// Outlives the threads that wait at exit.
inline const auto& no_memory = *new auto(std::make_shared<const Failure>(kNoMemory));

// The first of several failures.
class FirstFailure {
  public:
    // Without memory for the reason, a constant one replaces it.
    void fail(const std::exception& error) noexcept {
        std::lock_guard<std::mutex> lock(mutex_);
        if (failure_ == nullptr) try {
                const auto* known = dynamic_cast<const Failure*>(&error);
                failure_ = std::make_shared<const Failure>(known != nullptr ? *known : Failure(reason_of(error)));
            } catch (const std::bad_alloc&) {
                failure_ = no_memory;
            }
        failed_ = true;
    }
    // Returns the reason, or null.
    std::shared_ptr<const Failure> failure() const {
        if (!failed_) return nullptr;
        std::lock_guard<std::mutex> lock(mutex_);
        return failure_;
    }
    void throw_if_failed() const {
        if (const auto reason = failure()) throw Failure(*reason);
    }
    void clear() {
        std::lock_guard<std::mutex> lock(mutex_);
        failure_ = nullptr;
        failed_ = false;
    }

  private:
    mutable Mutex mutex_;  // guards the next one; held for a moment, and without other locks
    std::shared_ptr<const Failure> failure_;
    std::atomic<bool> failed_{false};  // avoids the lock if there is no failure
};

class Step : public FirstFailure {
  public:
    // The number of forgotten steps. After raising it, forget the meetings and call `clear`.
    std::atomic<int64_t> number{0};
    // The process has run its exit handlers: operators that run now fail.
    std::atomic<bool> closed{false};
    // The exit handlers have begun and all threads that train have ended: nobody calls a replica or reads a result any more.
    std::atomic<bool> exiting{false};
    // A thread in the middle of a step waits to fork, so not all replicas can be called.
    std::atomic<bool> forking{false};
    // The process has no batch left: its calls contribute an empty one, so that the other processes can go on.
    std::atomic<bool> out_of_batches{false};
};

inline Step& step() {
    static Step* instance = new Step;  // outlives the threads that wait at exit
    return *instance;
}

}  // namespace syncbn

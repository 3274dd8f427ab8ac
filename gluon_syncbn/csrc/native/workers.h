// Provides threads in which calls run and wait for each other: one for each simultaneous call, kept for later ones.
#pragma once

#include <memory>

namespace syncbn {
namespace native {

class Work {
  public:
    virtual ~Work() = default;
    virtual void run() noexcept = 0;
};

// Runs the work on an idle thread. Throws Failure if none can be started; then the work is gone.
void start(std::unique_ptr<Work> work);
// Called in the child of a fork, which has no workers.
void forget_workers();

}  // namespace native
}  // namespace syncbn

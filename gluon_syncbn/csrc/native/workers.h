// Threads in which calls run and wait for each other: as many as there are calls at a time, kept for later ones.
#pragma once

#include <memory>

namespace syncbn {
namespace native {

class Work {
  public:
    virtual ~Work() = default;
    virtual void run() noexcept = 0;
};

// On a thread that has nothing else to do. Throws Failure where none can be started; then the work is gone.
void start(std::unique_ptr<Work> work);
// In the child of a fork, which has none of them.
void forget_workers();

}  // namespace native
}  // namespace syncbn

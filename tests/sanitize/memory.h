// Memory that runs out while the core is at work.
#pragma once

namespace driver {

// As long as one lives, this thread is in the core; or back in the program that plays MXNet.
class Within {
  public:
    explicit Within(bool core);
    ~Within();
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;

  private:
    const bool before_;
};

// The n-th allocation of the core from now on fails, and no other; 0: none.
void fail_allocation(long n);
// Whether it has.
bool allocation_has_failed();

}  // namespace driver

// Fetches what the core has to say, on a thread of its own, as logs.py does.
#pragma once

#include <atomic>
#include <thread>

namespace driver {

class Records {
  public:
    Records() : thread_(&Records::fetch, this) {}
    ~Records();
    Records(const Records&) = delete;
    Records& operator=(const Records&) = delete;

  private:
    void fetch() const;

    std::atomic<bool> stop_{false};
    std::thread thread_;
};

}  // namespace driver

// Fetches what the core has to say, on a thread of its own, as logs.py does.
#pragma once

#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>

#include "core.h"
#include "figures.h"
#include "layer.h"
#include "log.h"

namespace driver {

class Records {
  public:
    Records()
        : thread_([this] {
              while (!stop_) pass_on(0.1);
          }) {}
    ~Records() {
        stop_ = true;
        thread_.join();
        while (pass_on(0)) continue;
    }
    Records(const Records&) = delete;
    Records& operator=(const Records&) = delete;

  private:
    // False where there is none.
    static bool pass_on(double seconds) {
        std::string text = text_of(syncbn_next_record(seconds));
        if (text.empty()) return false;
        ++figures.records;
        const int level = std::atoi(text.c_str());
        if (level <= static_cast<int>(syncbn::Level::kDoubt)) return true;  // asks for callers, or doubts
        text.erase(0, text.find(' ') + 1);
        expect(text.compare(0, 14, "SyncBatchNorm ") == 0, "'" + text + "' names its layer");
        ++figures.warnings;
        return true;
    }

    std::atomic<bool> stop_{false};
    std::thread thread_;
};

}  // namespace driver

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
    // "... cpu(0) came after 1.234 ms and waited 0.000 ms": none of these is the time since the machine was started.
    static void check_times(const std::string& text) {
        for (const std::string before : {" came after ", " and waited "}) {
            size_t at = text.find(before);
            bool right = at != std::string::npos;
            for (; at != std::string::npos; at = text.find(before, at + 1))
                right = right && std::atof(text.c_str() + at + before.size()) < 1e3 * kPatience;
            expect(right, "'" + text + "' tells who came when in one step");
        }
    }

    // False where there is none.
    static bool pass_on(double seconds) {
        std::string text = text_of(syncbn_next_record(seconds));
        if (text.empty()) return false;
        ++figures.records;
        const int level = std::atoi(text.c_str());
        if (level <= static_cast<int>(syncbn::Level::kDoubt)) return true;  // asks for callers, or doubts
        text.erase(0, text.find(' ') + 1);
        expect(text.compare(0, 14, "SyncBatchNorm ") == 0, "'" + text + "' names its layer");
        if (level == static_cast<int>(syncbn::Level::kWarning))
            ++figures.warnings;
        else
            check_times(text);
        return true;
    }

    std::atomic<bool> stop_{false};
    std::thread thread_;
};

}  // namespace driver

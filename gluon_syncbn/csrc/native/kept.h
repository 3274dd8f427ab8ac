// Keeps what threads have, for the threads that come after them.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "lock.h"

namespace syncbn {
namespace native {

// What each thread has of a type, by number. What it leaves when it ends is taken by the next thread that needs one.
template <typename T>
class Kept {
  public:
    template <typename Make>
    static T& get(int number, const Make& make) {
        auto& own = of_thread_.by_number;
        if (const auto found = own.find(number); found != own.end()) return found->second;
        {
            const std::lock_guard<std::mutex> lock(left_->mutex);
            auto& others = left_->by_number[number];
            if (!others.empty()) {
                const auto taken = own.emplace(number, others.back());
                others.pop_back();
                return taken.first->second;
            }
        }
        return own.emplace(number, make()).first->second;
    }

    // Visits those of this thread, and those that were left.
    template <typename Visit>
    static void visit(const Visit& visit) {
        for (auto& [number, one] : of_thread_.by_number) visit(number, one);
        const std::lock_guard<std::mutex> lock(left_->mutex);
        for (auto& [number, others] : left_->by_number)
            for (T& one : others) visit(number, one);
    }

  private:
    struct Left {
        Mutex mutex;
        std::map<int, std::vector<T>> by_number;
    };
    struct OfThread {
        std::map<int, T> by_number;
        ~OfThread() {
            const std::lock_guard<std::mutex> lock(left_->mutex);
            for (const auto& [number, one] : by_number) left_->by_number[number].push_back(one);
        }
    };
    static inline Left* const left_ = new Left;  // never destroyed: threads may end after it
    static inline thread_local OfThread of_thread_;
};

}  // namespace native
}  // namespace syncbn

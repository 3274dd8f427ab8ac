// Orders the updates of running statistics that several nodes of a graph share. Where MXNet keeps the operators of a
// graph, its engine does not know that they write these, and runs the nodes in any order, also two at once. So the nodes
// leave their updates, and an operation behind all of them makes these in the order of the graph.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "lock.h"

namespace syncbn {

class Updates {
  public:
    // `key`: what identifies the running statistics. `turn`: the node's place among those that share them.
    void leave(const void* key, int turn, std::function<void()> update) {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto& left = left_[key];
        int run = 0;  // of the body of a loop
        while (left.count({run, turn}) != 0) ++run;
        left.emplace(std::make_pair(run, turn), std::move(update));
    }
    void make(const void* key) {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto left = left_.extract(key);
        lock.unlock();
        if (!left.empty())
            for (const auto& [turn, update] : left.mapped()) update();
    }

  private:
    Mutex mutex_;  // guards the rest
    std::map<const void*, std::map<std::pair<int, int>, std::function<void()>>> left_;
};

inline Renewed<Updates>& updates = *new Renewed<Updates>;  // outlives the threads that wait at exit

}  // namespace syncbn

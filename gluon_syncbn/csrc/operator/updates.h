// Orders the updates of running statistics that several nodes of a graph share. Where MXNet keeps the operators of a
// graph, its engine does not know that they write these, and runs the nodes in any order, also two at once. An update
// waits for nobody, because an earlier node may wait for other replicas: who comes too early leaves it to the one before.
#pragma once

#include <functional>
#include <map>
#include <mutex>

#include "lock.h"

namespace syncbn {

class Updates {
  public:
    // A graph begins to run, and nothing is left of a run that failed. `key`: what identifies the running statistics.
    void begin(const void* key) {
        std::lock_guard<std::mutex> lock(mutex_);
        runs_.erase(key);
    }
    // Runs the update now or, if an earlier one of this run is missing, after that in its thread. `turn`: from 0 on.
    void run(const void* key, int turn, int turns, std::function<void()> update) {
        std::unique_lock<std::mutex> lock(mutex_);
        Run& run = runs_[key];  // until its last update: `begin` of the next run comes after all nodes
        run.waiting.emplace(turn, std::move(update));
        while (!run.busy && !run.waiting.empty() && run.waiting.begin()->first == run.next) {
            const auto next = run.waiting.extract(run.waiting.begin());
            run.busy = true;
            lock.unlock();
            next.mapped()();  // if it throws, the step fails, and the rest is never updated
            lock.lock();
            run.busy = false;
            ++run.next;
        }
        if (run.next == turns) runs_.erase(key);
    }

  private:
    struct Run {
        int next = 0;
        bool busy = false;  // a thread updates, and will look for the next one
        std::map<int, std::function<void()>> waiting;
    };
    Mutex mutex_;  // guards the rest
    std::map<const void*, Run> runs_;
};

inline Updates& updates() {
    static Updates* instance = new Updates;  // outlives the threads that wait at exit
    return *instance;
}

}  // namespace syncbn

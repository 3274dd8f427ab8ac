// Stores what a forward's recomputation needs to repeat its calls without a meeting. These are the statistics that
// normalised the slots, and the position at which the backward meets.
//
// The issuer of a forward opens a tape on its own thread, and the forward's calls find their memos there in program
// order. Recomputed forwards may be nested, so a thread has a stack of tapes.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "lock.h"
#include "meeting/meeting.h"
#include "pooling/pooling.h"
#include "tensor.h"
#include "waiting/wait.h"

namespace syncbn {

// What a call's forward leaves for those that repeat it.
class Memo {
  public:
    struct Result {
        Place place;
        std::shared_ptr<const Pools> pools;
        std::vector<Slot> slots;
        std::shared_ptr<const void> device;  // the statistics on a GPU
    };
    void keep(Result result) {
        std::lock_guard<std::mutex> lock(mutex_);
        result_ = std::make_shared<const Result>(std::move(result));
        changed_->notify_all();
    }
    // Waits for the result: the recomputation may begin before the whole forward has ended. Throws as the wait does.
    std::shared_ptr<const Result> result(Wait& wait) const {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!changed_->wait_for(lock, kSlice, [this] { return result_ != nullptr; })) wait.look();
        return result_;
    }
    // Counts earlier repetitions: each meets in its own backwards.
    int repeat() { return repeated_++; }

  private:
    mutable Mutex mutex_;
    mutable Condition changed_;
    std::shared_ptr<const Result> result_;
    std::atomic<int> repeated_{0};
};

struct Tape {
    std::vector<std::shared_ptr<Memo>> memos;  // in the order of the calls
    bool again = false;                        // calls repeat the memos; otherwise they add some
    size_t next = 0;                           // the memo of the next call that repeats one
};
inline thread_local std::vector<Tape*> tapes;  // that this thread has begun, the outermost first

// The memo of the call that this thread issues now, null if there is no recomputation; and whether it repeats that.
inline std::pair<std::shared_ptr<Memo>, bool> next_memo() {
    std::pair<std::shared_ptr<Memo>, bool> found;
    for (Tape* tape : tapes) {  // the recomputation of an outer one is new to the inner ones
        if (!tape->again) continue;
        if (tape->next < tape->memos.size()) found = {tape->memos[tape->next], true};
        ++tape->next;
    }
    if (!found.first && !tapes.empty()) found.first = std::make_shared<Memo>();
    for (Tape* tape : tapes)
        if (!tape->again) tape->memos.push_back(found.first);
    return found;
}

}  // namespace syncbn
